"""Before a run: what is checked, tried and shown, with no weights read."""
