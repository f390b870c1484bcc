"""A run: its checkpoint and rows, its trainer, its folder and log."""
