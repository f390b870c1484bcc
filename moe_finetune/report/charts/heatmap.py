"""Matrices as heat maps: the page's script paints the cells and reads them out."""

import base64
import json
from collections.abc import Sequence

import numpy as np

from moe_finetune.report.charts.frame import percent
from moe_finetune.report.markup import Markup, number, tag

MISSING = 65535
MOST_CELLS = 100_000
"""Largest number of cells in all frames of one figure; each takes 16 bits, in base64."""


def heat_map(
    title: str,
    description: str,
    frames_FRC: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row_name: str,
    column_name: str,
    limits: tuple[float, float],
    unit: str = "",
    picks: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> Markup:
    """A heat map of one matrix, or of one per frame of the figure's slider; NaN stays blank.

    Args:
        rows, columns: a label for each; ``row_name``, ``column_name``: what they are.
        limits: the values at the ends of the color map; values beyond them are clipped.
        picks: the frame at each position of the slider; ``notes``: the text in the panel's head.
    """
    frames_FRC = np.asarray(frames_FRC, float).reshape(-1, len(rows), len(columns))
    height, left = _height(len(rows), len(columns)), 10 + round(6.6 * max(map(len, rows)))
    marks: list[Markup] = [tag("image", width="100%", height="100%", preserveAspectRatio="none")]
    marks += _grid(len(rows), len(columns))
    for i in _labelled(len(rows), max(1, height // 14)):
        at = percent((i + 0.5) / len(rows))
        marks.append(tag("text", rows[i], x="0", y=at, dx="-6", dy=".33em", class_="tick end"))
    for i in _labelled(len(columns), 8 if max(map(len, columns)) < 5 else 4):
        at = percent((i + 0.5) / len(columns))
        marks.append(tag("text", columns[i], x=at, y="100%", dy="15", class_="tick middle"))
    marks.append(tag("text", column_name, x="50%", y="100%", dy="31", class_="label middle"))
    marks.append(tag("text", row_name, x="0", y="0", dx=str(-left + 4), dy="-7", class_="label"))
    cells = {
        "rows": list(rows),
        "columns": list(columns),
        "rowName": row_name,
        "columnName": column_name,
        "unit": unit,
        "limits": limits,
        "picks": list(picks) or [len(frames_FRC) - 1],
        "notes": list(notes),
        **_levels(frames_FRC),
    }
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        marks,
        class_="plot heat",
        role="img",
        tabindex="0",
        style=f"--left:{left}px;--bottom:37px;--top:20px;height:{height}px",
        data_cells=json.dumps(cells, separators=(",", ":"), ensure_ascii=False),
    )


def _levels(frames_FRC: np.ndarray) -> dict[str, float | str]:
    """The values as 16-bit levels between their minimum and maximum."""
    known_FRC = np.isfinite(frames_FRC)
    low, high = (float(end(frames_FRC[known_FRC], initial=0.0)) for end in (np.min, np.max))
    share_FRC = np.nan_to_num((frames_FRC - low) / (high - low or 1.0), posinf=0, neginf=0)
    levels_FRC = np.where(known_FRC, np.round(share_FRC * (MISSING - 1)), MISSING)
    data = base64.b64encode(levels_FRC.astype("<u2").tobytes()).decode()
    return {"low": low, "high": high, "levels": data}


def _height(rows: int, columns: int) -> int:
    """Return the height in CSS pixels at which cells are near square in a panel of 320."""
    cell = min(24.0, max(320 / columns, 3.0))
    return round(min(max(rows * cell, 64), 340))


def _grid(rows: int, columns: int) -> list[Markup]:
    """Return the lines between cells, if the cells are large enough."""
    if columns > 40 or rows > 40:
        return []
    across = [percent(i / columns) for i in range(1, columns)]
    down = [percent(i / rows) for i in range(1, rows)]
    lines = [tag("line", x1=at, x2=at, y1="0", y2="100%", class_="gap") for at in across]
    return lines + [tag("line", x1="0", x2="100%", y1=at, y2=at, class_="gap") for at in down]


def _labelled(count: int, most: int) -> range:
    """Return which of ``count`` rows get a label, at most ``most`` of them, evenly."""
    step = next(s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64, 128, 256, 1024) if count / s <= most)
    return range(0, count, step)


def legend(limits: tuple[float, float], meaning: str, *, clipped: bool = False) -> Markup:
    """Return the color bar with its ends. ``clipped``: some values exceed the upper end."""
    low, high = (number(end) for end in limits)
    return tag(
        "div",
        tag("span", low),
        tag("span", class_="bar"),
        tag("span", f"≥ {high}" if clipped else high),
        tag("span", meaning, class_="meaning"),
        class_="legend",
    )


def shared_limits(matrices: Sequence[np.ndarray]) -> tuple[tuple[float, float], bool]:
    """Return limits from 0 for pictures that are compared, and whether values go beyond them.

    One very busy expert must not darken all others: the upper end is the 99th percentile if the
    maximum is more than 1.5 times as large.
    """
    values = np.concatenate([m[np.isfinite(m)].ravel() for m in matrices])
    if not values.size:
        return (0.0, 1.0), False
    most, end = float(values.max()), float(np.percentile(values, 99))
    if end > 0 and most > 1.5 * end:
        return (0.0, end), True
    return (0.0, most or 1.0), False
