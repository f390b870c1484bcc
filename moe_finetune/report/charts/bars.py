"""Bars from zero: one value a run, on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_finetune.report.charts.frame import percent
from moe_finetune.report.markup import Markup, number, tag

BAR, GAP = 16, 6  # CSS pixels
ROOM = 0.78  # share of the width for the longest bar; its value stands behind it


def bars(title: str, description: str, values: Sequence[tuple[str, float, str]]) -> Markup:
    """Return a bar for each label, value (0 or more) and colour, from the top."""
    longest = max((value for _, value, _ in values if math.isfinite(value)), default=0.0)
    marks = []
    for place, (label, value, color) in enumerate(values):
        if not math.isfinite(value):
            continue
        share = ROOM * max(value, 0.0) / longest if longest > 0 else 0.0
        top = place * (BAR + GAP)
        said = f"{label} {number(value)}"
        marks.append(
            tag(
                "g",
                tag("rect", x="0", y=str(top), width=percent(share), height=str(BAR), rx="3"),
                tag("text", number(value), x=percent(share), dx="6", y=str(top + BAR - 4)),
                style=f"--c:{color}",
                data_tip=said,
            )
        )
    height = len(values) * (BAR + GAP) - GAP
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        marks,
        class_="bars",
        role="img",
        style=f"height:{height}px",
    )
