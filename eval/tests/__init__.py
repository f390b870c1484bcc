"""Tests of what is in ``eval/``; ``make test-eval`` runs them."""
