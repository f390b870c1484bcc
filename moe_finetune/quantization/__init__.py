"""Frozen weights in 4 or 8 bits: number formats, tensors, and formats of checkpoints."""
