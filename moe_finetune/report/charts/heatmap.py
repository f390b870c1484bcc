"""Matrices as heat maps: one pixel a cell in a tiny PNG, labels and hover values around it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np

from moe_finetune.report.charts.frame import percent
from moe_finetune.report.colors import diverging, sequential
from moe_finetune.report.markup import Markup, number, tag
from moe_finetune.report.png import data_uri, indexed_png

HOVER_CELLS = 20_000  # larger matrices come without hover values, for the page's size
MISSING = 65535


def heat_map(
    title: str,
    description: str,
    matrix_RC: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row_name: str,
    column_name: str,
    limits: tuple[float, float],
    unit: str = "",
    differences: bool = False,
) -> Markup:
    """Return a heat map; missing values (NaN) are left as holes.

    Args:
        matrix_RC: the values.
        rows, columns: a label for each row and column.
        row_name, column_name: what rows and columns are, for axes and hover.
        limits: the values at the ends of the colour map; beyond them the colour stays.
        unit: said after a value on hover.
        differences: use the diverging map; ``limits`` are then symmetric.
    """
    low, high = limits
    scaled_RC = np.clip((matrix_RC - low) / max(high - low, 1e-300), 0, 1)
    known_RC = np.isfinite(scaled_RC)
    # level 0 is transparent: a hole
    levels_RC = np.where(known_RC, 1 + np.round(np.nan_to_num(scaled_RC) * 254), 0).astype(np.uint8)
    colors = diverging(255) if differences else sequential(255)
    picture = data_uri(indexed_png(levels_RC, [(0, 0, 0, 0), *colors]))

    height, left = _height(*matrix_RC.shape), 10 + round(6.6 * max(map(len, rows)))
    marks: list[Markup] = [
        tag("image", href=picture, width="100%", height="100%", preserveAspectRatio="none")
    ]
    marks += _grid(*matrix_RC.shape)
    for i in _labelled(len(rows), max(1, height // 14)):
        at = percent((i + 0.5) / len(rows))
        marks.append(tag("text", rows[i], x="0", y=at, dx="-6", dy=".33em", class_="tick end"))
    for i in _labelled(len(columns), 8 if max(map(len, columns)) < 5 else 4):
        at = percent((i + 0.5) / len(columns))
        marks.append(tag("text", columns[i], x=at, y="100%", dy="15", class_="tick middle"))
    marks.append(tag("text", column_name, x="50%", y="100%", dy="31", class_="label middle"))
    marks.append(tag("text", row_name, x="0", y="0", dx=str(-left + 4), dy="-7", class_="label"))
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        marks,
        class_="plot heat",
        role="img",
        tabindex="0",
        style=f"--left:{left}px;--bottom:37px;--top:20px;height:{height}px",
        data_cells=_hover(matrix_RC, rows, columns, row_name, column_name, unit),
    )


def _height(rows: int, columns: int) -> int:
    """Return the height in CSS pixels at which cells are near square in a panel of 320."""
    cell = min(24.0, max(320 / columns, 3.0))
    return round(min(max(rows * cell, 64), 340))


def _grid(rows: int, columns: int) -> list[Markup]:
    """Return the lines between cells, where these are large enough to be parted."""
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


def _hover(
    matrix_RC: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    row_name: str,
    column_name: str,
    unit: str,
) -> str | None:
    """Return the cells as 16-bit levels between the least and the greatest value."""
    finite = matrix_RC[np.isfinite(matrix_RC)]
    if matrix_RC.size > HOVER_CELLS or not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    share_RC = np.nan_to_num((matrix_RC - low) / (high - low or 1.0), posinf=0, neginf=0)
    levels_RC = np.where(np.isfinite(matrix_RC), np.round(share_RC * (MISSING - 1)), MISSING)
    data = {
        "rows": list(rows),
        "columns": list(columns),
        "rowName": row_name,
        "columnName": column_name,
        "low": low,
        "high": high,
        "unit": unit,
        "levels": base64.b64encode(levels_RC.astype("<u2").tobytes()).decode(),
    }
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def legend(
    limits: tuple[float, float], meaning: str, *, differences: bool = False, clipped: bool = False
) -> Markup:
    """Return the colour bar with its ends. ``clipped``: greater values occur beyond the end."""
    low, high = (number(end) for end in limits)
    return tag(
        "div",
        tag("span", low),
        tag("span", class_="bar " + ("diverging" if differences else "sequential")),
        tag("span", f"≥ {high}" if clipped else high),
        tag("span", meaning, class_="meaning"),
        class_="legend",
    )


def shared_limits(matrices: Sequence[np.ndarray]) -> tuple[tuple[float, float], bool]:
    """Return limits from 0 for pictures that are compared, and whether values go beyond them.

    One very busy expert must not darken all others: the end is the 99th percentile when the
    greatest value is more than half again as large.
    """
    values = np.concatenate([m[np.isfinite(m)].ravel() for m in matrices])
    if not values.size:
        return (0.0, 1.0), False
    most, end = float(values.max()), float(np.percentile(values, 99))
    if end > 0 and most > 1.5 * end:
        return (0.0, end), True
    return (0.0, most or 1.0), False
