"""Routing traces: recording, sums, metrics and comparison."""
