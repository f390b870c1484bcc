"""The memory of a run, predicted before anything is loaded."""
