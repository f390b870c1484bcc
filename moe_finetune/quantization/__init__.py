"""Frozen weights in 4 or 8 bits under an adapter: formats, tensors, streaming load."""
