"""The demo: a small checkpoint, data and held-out tasks, all created here."""
