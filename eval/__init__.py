"""Suites and tasks for lm-evaluation-harness, and what measures this project."""
