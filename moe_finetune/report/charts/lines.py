"""Curves over training steps or layers, one line for each series."""

import json
import math
from dataclasses import dataclass

import numpy as np

from moe_finetune.report.charts.frame import SIZE, Scale, inner, percent, plot
from moe_finetune.report.markup import Markup, tag

KEPT = 200  # points of a line; more are indistinguishable at this size
HEIGHT = 170  # CSS pixels of the plotted area
SMOOTH_FROM = 60  # shorter curves are not smoothed


@dataclass(frozen=True)
class Series:
    """A line: its name, color (CSS) and points, x ascending; NaN makes a gap.

    ``kind``: "", or "baseline" or "before", which are drawn behind the others and not solid.
    """

    label: str
    color: str
    x: list[float]
    y: list[float]
    kind: str = ""


def line_chart(
    title: str,
    description: str,
    series: list[Series],
    *,
    x_label: str = "step",
    smooth: bool = True,
    zero: bool = False,
    reference: float | None = None,
    reference_label: str = "",
) -> Markup:
    """The lines in one plot; those with a ``kind`` are behind the others.

    ``smooth`` draws long curves as a moving mean over the faint raw curve, ``zero`` lets y start at
    zero, ``reference`` is marked with a dashed level.
    """
    y_values = [v for s in series for v in s.y]
    y_values += [] if reference is None else [reference]
    y = Scale.around(y_values, zero=zero)
    xs = [v for s in series for v in s.x]
    x = Scale.exact(min(xs, default=0.0), max(xs, default=1.0))
    lines: list[Markup] = []
    if reference is not None:
        level = SIZE * (1 - y(reference))
        lines.append(tag("path", d=f"M0 {level:.0f}H{SIZE}", class_="reference"))
    label: Markup | None = None
    if reference is not None and reference_label:
        at = percent(1 - y(reference))
        label = tag("text", reference_label, x="100%", y=at, dy="-5", class_="tick end halo")
    hover = []
    for s in sorted(series, key=lambda s: not s.kind):
        averaged = smooth and len(s.y) >= SMOOTH_FROM
        points = _thin(s.x, s.y)
        if averaged:
            lines.append(_line(points, x, y, s, "faint"))
        drawn = _thin(s.x, moving_mean(s.y)) if averaged else points
        lines.append(_line(drawn, x, y, s, "line"))
    for s in series:
        points = _thin(s.x, s.y)
        hover.append(
            {
                "label": s.label,
                "color": s.color,
                "x": [float(f"{px:.6g}") for px, _ in points],
                "y": [float(f"{py:.4g}") if math.isfinite(py) else None for _, py in points],
            }
        )
    data = {"low": x.low, "high": x.high, "axis": x_label, "series": hover}
    return plot(
        title,
        description,
        inner(*lines),
        label,
        height=HEIGHT,
        x=x,
        y=y,
        x_label=x_label,
        data_lines=json.dumps(data, separators=(",", ":")),
        tabindex="0",
    )


def _line(points: list[tuple[float, float]], x: Scale, y: Scale, s: Series, kind: str) -> Markup:
    path = ""
    pen_down = False
    finite = [p for p in points if math.isfinite(p[1])]
    for px, py in points:
        if not math.isfinite(py):
            pen_down = False
            continue
        # a zero-length stroke makes a lone point visible
        start = f"M{SIZE * x(px):.0f} {SIZE * (1 - y(py)):.0f}"
        path += f"L{start[1:]}" if pen_down else f"{start}h0"
        pen_down = True
    classes = f"{kind} {s.kind}".strip() + (" lone" if len(finite) == 1 else "")
    return tag("path", d=path, class_=classes, style=f"--c:{s.color}")


def _thin(x: list[float], y: list[float]) -> list[tuple[float, float]]:
    """Keep the minimum and maximum of each stretch, and both ends."""
    points = list(zip(x, y, strict=True))
    if len(points) <= KEPT:
        return points
    thinned: list[tuple[float, float]] = [points[0]]
    stretch = 2 * len(points) / KEPT
    for i in range(KEPT // 2):
        part = points[round(i * stretch) : round((i + 1) * stretch)]
        finite = [p for p in part if math.isfinite(p[1])]
        if not finite:
            thinned.append(part[0])
            continue
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        thinned += sorted(ends)
    thinned.append(points[-1])
    return thinned


def moving_mean(values: list[float], window: int | None = None) -> list[float]:
    """Return the centered mean over ``window`` points (a fifteenth of all by default), without NaN.

    At the ends the window is truncated, not shifted; NaN stays NaN.
    """
    half = (window or max(3, len(values) // 15)) // 2
    finite, near = np.isfinite(values), np.ones(2 * half + 1)
    sums, counts = (
        np.convolve(part, near)[half : half + len(values)]
        for part in (np.where(finite, values, 0.0), finite)
    )
    return np.where(finite, sums / np.maximum(counts, 1), np.nan).tolist()
