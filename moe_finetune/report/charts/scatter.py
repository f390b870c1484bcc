"""Points in the plane, the most frequent groups in color and with their own shape."""

import math
from collections import Counter
from collections.abc import Sequence

from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.markup import Markup, tag

SIDE = 320
MARGIN = 10
SHAPES = ("circle", "triangle", "square", "diamond", "cross", "ring")


def largest_groups(groups: Sequence[int], count: int) -> list[int]:
    """Return the most frequent groups, the most frequent first; ties by number."""
    ordered = sorted(Counter(groups).items(), key=lambda item: (-item[1], item[0]))
    return [g for g, _ in ordered[:count]]


def scatter(
    title: str,
    description: str,
    points: Sequence[tuple[float, float, int]],
    *,
    named: Sequence[int],
) -> Markup:
    """Return the points; groups outside ``named`` are small and gray, behind.

    Args:
        points: x, y, group; points that are not finite are omitted.
        named: the groups to distinguish by color and shape (at most six).
    """
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    xs, ys = [p[0] for p in finite], [p[1] for p in finite]
    low_x, low_y = min(xs, default=0.0), min(ys, default=0.0)
    # one scale for both axes, so that distances are meaningful
    spread = max(max(xs, default=1.0) - low_x, max(ys, default=1.0) - low_y) or 1.0
    off_x = (spread - (max(xs, default=1.0) - low_x)) / 2
    off_y = (spread - (max(ys, default=1.0) - low_y)) / 2
    unit = (SIDE - 2 * MARGIN) / spread

    paths: dict[int, str] = {-1: ""}
    for px, py, g in finite:
        x = MARGIN + (px - low_x + off_x) * unit
        y = SIDE - MARGIN - (py - low_y + off_y) * unit
        rank = named.index(g) if g in named else -1
        paths[rank] = paths.get(rank, "") + _shape(rank, x, y)
    marks = [tag("path", d=paths[-1], class_="others")]
    for rank in sorted(set(paths) - {-1}):
        shape = SHAPES[rank % len(SHAPES)]
        style = f"--c:{nth_color(rank)}"
        marks.append(tag("path", d=paths[rank], class_=f"points {shape}", style=style))
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        marks,
        viewBox=f"0 0 {SIDE} {SIDE}",
        class_="scatter",
        role="img",
    )


def key(named: Sequence[int], *, others: bool) -> Markup:
    """Return the legend of a scatter."""
    entries = []
    for rank, g in enumerate(named):
        shape = SHAPES[rank % len(SHAPES)]
        mark = tag(
            "path", d=_shape(rank, 7, 7), class_=f"points {shape}", style=f"--c:{nth_color(rank)}"
        )
        icon = tag("svg", mark, viewBox="0 0 14 14", class_="icon", aria_hidden="true")
        entries.append(tag("li", icon, f"expert {g}"))
    if others:
        mark = tag("path", d=_shape(-1, 7, 7), class_="others")
        icon = tag("svg", mark, viewBox="0 0 14 14", class_="icon", aria_hidden="true")
        entries.append(tag("li", icon, "others"))
    return tag("ul", entries, class_="key")


def _shape(rank: int, x: float, y: float) -> str:
    if rank < 0:
        return f"M{x:.1f} {y:.1f}h0"
    at = f"{x:.1f} {y:.1f}"
    shape = SHAPES[rank % len(SHAPES)]
    if shape == "circle":
        return f"M{at}h0"
    if shape == "triangle":
        return f"M{x:.1f} {y - 3.6:.1f}l3.3 6h-6.6z"
    if shape == "square":
        return f"M{x - 2.7:.1f} {y - 2.7:.1f}h5.4v5.4h-5.4z"
    if shape == "diamond":
        return f"M{x:.1f} {y - 3.9:.1f}l3.2 3.9l-3.2 3.9l-3.2-3.9z"
    if shape == "cross":
        return f"M{x - 2.8:.1f} {y:.1f}h5.6M{x:.1f} {y - 2.8:.1f}v5.6"
    return f"M{x - 2.8:.1f} {y:.1f}a2.8 2.8 0 1 0 5.6 0a2.8 2.8 0 1 0 -5.6 0"
