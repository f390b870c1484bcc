"""Scoring of the local templates."""

from __future__ import annotations


def exact(doc, results):
    """Compare reply and answer as text without surrounding white space."""
    return {"exact_match": float(results[0].strip() == doc["answer"].strip())}
