"""vLLM: installation, engine, server and plugin."""
