"""The program that made the demo's checkpoint and rows (``recipes/demo``)."""
