"""Heat maps side by side, one per run, with one slider over training."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_finetune.report.charts.heatmap import MOST_CELLS, heat_map
from moe_finetune.report.context import END, START, Snapshot, Timeline
from moe_finetune.report.markup import Markup, join, tag
from moe_finetune.report.routing_snapshots import Routing


def panel(shot: Snapshot, picture: Markup, note: str | None = None) -> Markup:
    """Return one of several pictures that share a figure, under its snapshot's name."""
    head = tag("div", shot.name, tag("span", note, class_="note") if note else None, class_="head")
    return tag("div", head, picture, class_="panel")


def panels(parts: list[Markup], columns: int = 0, *, square: bool = False) -> Markup:
    """Return pictures side by side; many columns get wider panels, ``square`` keeps the shape."""
    kind = "square" if square else "broad" if columns > 48 else ""
    return tag("div", parts, class_=f"panels {kind}".strip())


def experts(count: int) -> list[str]:
    """Return the experts' numbers as labels."""
    return [str(e) for e in range(count)]


def expert_map(
    title: str, description: str, routing: Routing, values: np.ndarray,
    limits: tuple[float, float], unit: str = "", **options: Any,
) -> Markup:  # fmt: skip
    """Return a heat map of layers x experts; see :func:`heat_map`."""
    names = [str(layer) for layer in routing.layers]
    return heat_map(
        title, description, values, rows=names, columns=experts(routing.num_experts),
        row_name="layer", column_name="expert", limits=limits, unit=unit, **options,
    )  # fmt: skip


Frames = tuple[Timeline, list[Routing], list[int]]
"""A run's routing over time: its frames, and which of them each position shows."""


def over_time(
    timelines: Sequence[Timeline], cells: int, has_picture: Callable[[Routing], bool]
) -> tuple[list[str], list[Frames]]:
    """Choose the positions of a slider: the name of each, and the frames of each run.

    A frame has so many ``cells``; the page's size limits the number of frames, spread evenly over
    training. Frames without a picture are left out.
    """
    chosen: list[tuple[Timeline, dict[float, Routing]]] = []
    most = max(2, MOST_CELLS // (cells * max(1, len(timelines))))
    for line in timelines:
        steps = sorted(step for step, routing in line.routings.items() if has_picture(routing))
        at = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
        if steps:
            chosen.append((line, {steps[i]: line.routings[steps[i]] for i in at}))
    positions = sorted({step for _, routings in chosen for step in routings})
    frames = []
    for line, routings in chosen:
        # a run that was not measured at a position shows its last measurement before it
        counts = [sum(step <= position for step in routings) for position in positions]
        frames.append((line, list(routings.values()), [max(0, count - 1) for count in counts]))
    names = {START: "before fine-tuning", END: "after fine-tuning"}
    return [names.get(position, f"step {position:g}") for position in positions], frames


def slider(places: Sequence[str]) -> Markup | None:
    """Return the slider for all heat maps of a figure; None if there is only one position."""
    if len(places) < 2:
        return None
    last = len(places) - 1
    bar = tag(
        "input", type="range", min="0", max=str(last), value=str(last), step="1",
        aria_label="Point in training", aria_valuetext=places[-1], data_places="\n".join(places),
    )  # fmt: skip
    play = tag("button", "Play", type="button", class_="play")
    return tag("div", join([play, bar, tag("output", places[-1])]), class_="slider")
