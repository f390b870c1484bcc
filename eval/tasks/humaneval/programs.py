"""Generated programs are scored later, in the sandbox; here only whether there is a reply."""

from __future__ import annotations


def replied(doc, results):
    """Return 1 for a reply that is not blank."""
    return {"replied": float(bool(results[0].strip()))}
