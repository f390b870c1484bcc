"""The embedded default: a small checkpoint, data and held-out tasks that it creates."""
