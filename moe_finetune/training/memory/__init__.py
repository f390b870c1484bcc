"""Peak memory predicted before a run."""
