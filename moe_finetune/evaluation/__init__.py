"""Evaluation: suites on lm-evaluation-harness, code in a sandbox, comparison, judges, people."""
