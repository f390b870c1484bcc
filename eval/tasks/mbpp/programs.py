"""Generated programs are scored later, in the sandbox; here only whether there is a reply."""

from __future__ import annotations


def replied(doc, results):
    """Return 1 for a reply that is not blank."""
    return {"replied": float(bool(results[0].strip()))}


def examples(dataset):
    """Keep the three examples of Austin et al. 2021 (task ids 2, 3 and 4 of the prompt split)."""
    return dataset.filter(lambda row: row["task_id"] in (2, 3, 4))
