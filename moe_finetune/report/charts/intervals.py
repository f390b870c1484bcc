"""Values with their intervals: rows of dots and bars on one axis."""

import math
from dataclasses import dataclass

from moe_finetune.report.charts.frame import Scale, percent, plot
from moe_finetune.report.markup import Markup, tag

LINE = 18  # CSS pixels of one dot's row
HEAD = 24  # and of the row's name above it


@dataclass(frozen=True)
class Dot:
    """A value with its interval (NaN ends: none), its color and the text shown on hover."""

    value: float
    low: float
    high: float
    color: str
    text: str
    hollow: bool = False


def dot_plot(
    title: str,
    description: str,
    rows: list[tuple[str, list[Dot], float]],
    *,
    x_label: str,
    scale: float = 1.0,
) -> Markup:
    """One band per row: its name, one dot per run, and a tick at the row's chance level (NaN:
    none).
    """
    values = [v for _, dots, c in rows for d in dots for v in (d.value, d.low, d.high, c)]
    x = Scale.around([scale * v for v in values], count=5)
    height = sum(HEAD + LINE * len(dots) for _, dots, _ in rows)
    top = 0
    marks: list[Markup] = []
    for tick in x.ticks:
        at = percent(x(tick))
        marks.append(tag("line", x1=at, x2=at, y1="0", y2="100%", class_="rule"))
    for name, dots, chance in rows:
        band = LINE * len(dots)
        marks.append(tag("text", name, x="0", y=str(top + 15), class_="row-name"))
        if math.isfinite(chance):
            at = percent(x(scale * chance))
            ends = {"y1": str(top + HEAD - 4), "y2": str(top + HEAD + band - 4)}
            line = tag("line", tag("title", "chance"), x1=at, x2=at, class_="chance", **ends)
            marks.append(line)
        for i, dot in enumerate(dots):
            if math.isfinite(dot.value):
                marks.append(_dot(dot, x, scale, top + HEAD + LINE * i + LINE // 2 - 3))
        top += HEAD + band
    return plot(title, description, *marks, height=height, x=x, x_label=x_label, left=6)


def _dot(dot: Dot, x: Scale, scale: float, y: int) -> Markup:
    at = percent(x(scale * dot.value))
    bar = None
    if math.isfinite(dot.low):
        ends = {"x1": percent(x(scale * dot.low)), "x2": percent(x(scale * dot.high))}
        bar = tag("line", **ends, y1=str(y), y2=str(y), class_="whisker")
    circle = tag("circle", cx=at, cy=str(y), r="5")
    kind = "dot-mark hollow" if dot.hollow else "dot-mark"
    return tag("g", bar, circle, class_=kind, style=f"--c:{dot.color}", data_tip=dot.text)


def forest(
    title: str, description: str, value: float, low: float, high: float, reach: float, color: str
) -> Markup:
    """Return a small bar of a difference's interval around zero; the axis ends at ``±reach``."""
    x = Scale(-reach, reach, ())
    ends = {"x1": percent(x(low)), "x2": percent(x(high))} if math.isfinite(low) else None
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        tag("line", x1="0", x2="100%", y1="50%", y2="50%", class_="rule"),
        tag("line", x1="50%", x2="50%", y1="0", y2="100%", class_="zero"),
        tag("line", **ends, y1="50%", y2="50%", class_="whisker") if ends else None,
        tag("circle", cx=percent(x(value)), cy="50%", r="5") if math.isfinite(value) else None,
        class_="forest",
        role="img",
        style=f"--c:{color}",
    )
