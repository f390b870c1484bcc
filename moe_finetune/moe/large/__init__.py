"""One large model: experts spread over ranks, offloaded, quantized."""
