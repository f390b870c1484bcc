"""What experts were chosen: traces of it, sums over them, comparison of two."""
