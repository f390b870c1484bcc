"""The frame of a plot: an SVG as large as the plotted area, its labels in the margin around it.

Positions are percentages and the data is in an inner SVG that stretches, so that a plot fills
any width while text and line widths keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_finetune.report.markup import Markup, number, tag

SIZE = 1000  # the inner SVG's coordinates go from 0 to SIZE both ways


@dataclass(frozen=True)
class Scale:
    """A linear map of data to 0..1 with the ticks to label."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: Sequence[float], count: int = 4, zero: bool = False) -> Scale:
        """Return a scale over the finite values, widened to round ticks at both ends."""
        finite = [v for v in values if math.isfinite(v)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        size = max(abs(low), abs(high))
        if high - low <= 0.01 * size or not size:  # noise must not fill the frame
            middle, room = (low + high) / 2, 0.05 * size or 1.0
            low, high = middle - room, middle + room
        step = _round_step((high - low) / count)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(i * step for i in range(first, last + 1))
        return cls(ticks[0], ticks[-1], ticks)

    @classmethod
    def exact(cls, low: float, high: float) -> Scale:
        if high <= low:
            high = low + 1.0
        step = _round_step(max(1.0, (high - low) / 4), (1, 2, 5, 10))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(i * step for i in range(first, last + 1)))

    def __call__(self, value: float) -> float:
        """Return the position of ``value``: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def _round_step(rough: float, round_numbers: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in round_numbers if m * power >= rough * (1 - 1e-9))


def nth_color(rank: int) -> str:
    """Return the page's color number ``rank``, from 0; there are six."""
    return f"var(--run-{1 + rank % 6})"


def percent(share: float) -> str:
    """Return a position as a percentage for SVG."""
    return f"{100 * share:.2f}%"


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """Return a tick's label with the decimals that its neighbors need."""
    largest = max(abs(t) for t in ticks)
    if largest >= 10_000 and all(t % 1000 == 0 for t in ticks):
        return f"{number(round(value / 1000))}k"
    step = ticks[1] - ticks[0] if len(ticks) > 1 else (abs(value) or 1)
    if largest and (largest < 1e-3 or largest >= 1e6):
        power = math.floor(math.log10(largest))
        return f"{value / 10**power:.3g}e{power}".replace("-", "−") if value else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals and round(step, decimals) != round(step, decimals + 2):
        decimals += 1
    return f"{value:.{decimals}f}".replace("-", "−")


def plot(
    title: str,
    description: str,
    *content: Markup | None,
    height: int,
    x: Scale | None = None,
    y: Scale | None = None,
    x_label: str | None = None,
    left: int = 46,
    **attributes: str | None,
) -> Markup:
    """A plot: grid, ticks, then ``content`` (in percent coordinates, or an :func:`inner` SVG) over
    them.

    ``title`` and ``description`` are for screen readers; ``height`` and ``left``, the width of the
    y labels, are CSS pixels; ``attributes`` are ``data_...`` for the page's script.
    """
    marks: list[Markup] = []
    for tick in y.ticks if y else ():
        assert y is not None
        at = percent(1 - y(tick))
        marks.append(tag("line", x1="0", x2="100%", y1=at, y2=at, class_="rule"))
        text = tick_text(tick, y.ticks)
        marks.append(tag("text", text, x="0", y=at, dx="-8", dy=".33em", class_="tick end"))
    for tick in x.ticks if x else ():
        assert x is not None
        at = percent(x(tick))
        # centered, the first and the last label would exceed the picture
        side = " end" if x(tick) > 0.97 else "" if x(tick) < 0.03 else " middle"
        text = tick_text(tick, x.ticks)
        marks.append(tag("text", text, x=at, y="100%", dy="17", class_=f"tick{side}"))
    if x_label:
        marks.append(tag("text", x_label, x="50%", y="100%", dy="34", class_="label middle"))
    bottom = 40 if x_label else 22 if x else 6
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        marks,
        *content,
        class_="plot",
        role="img",
        style=f"--left:{left}px;--bottom:{bottom}px;--top:8px;height:{height}px",
        **attributes,
    )


def inner(*content: Markup) -> Markup:
    """Return the stretched drawing area: coordinates 0..SIZE both ways, y downwards."""
    return tag(
        "svg",
        *content,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
        class_="inner",
    )
