"""The embedded default: a small checkpoint, its data and its held-out tasks, made on the spot."""
