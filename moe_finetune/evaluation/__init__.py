"""Evaluation: suites on lm-evaluation-harness, code in a sandbox, comparison with an interval."""
