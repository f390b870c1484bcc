"""Whether a run fits, told before anything is loaded."""
