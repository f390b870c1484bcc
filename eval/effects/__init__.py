"""Tests of the papers' claims on small runs: ``python -m eval.effects FILE``."""
