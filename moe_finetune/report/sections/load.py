"""Load: how often each expert is selected, and how that changed."""

from collections.abc import Sequence

import numpy as np

from moe_finetune.report.charts.heatmap import legend, shared_limits
from moe_finetune.report.context import Snapshot, Timeline, figure, listed
from moe_finetune.report.markup import Markup, number
from moe_finetune.report.routing_snapshots import Routing
from moe_finetune.report.sections.panels import expert_map, over_time, panel, panels, slider

UNIT = "× even share"


def _max_violation(routing: Routing) -> float:
    return routing.metrics()["max_violation"].mean


def load(timelines: Sequence[Timeline], title: str) -> Markup:
    """Return the load of every expert in every layer, over training."""
    cells = max(line.shot.routing.load_LE.size for line in timelines)
    places, frames = over_time(timelines, cells, lambda _: True)
    loads = [np.stack([r.relative_load_LE() for r in routings]) for _, routings, _ in frames]
    limits, clipped = shared_limits(loads)
    parts = []
    for (line, routings, picks), load_FLE in zip(frames, loads, strict=True):
        notes = [f"MaxVio {number(_max_violation(routings[i]))}" for i in picks]
        last_LE, layers = load_FLE[-1], routings[-1].layers
        busiest = np.unravel_index(np.nanargmax(last_LE), last_LE.shape)
        described = (
            f"{notes[-1]}. The busiest is expert {busiest[1]} of layer {layers[busiest[0]]}, with "
            f"{number(float(last_LE[busiest]))} times an even share. {int((last_LE == 0).sum())} "
            f"of {last_LE.size} are never selected."
        )
        name = f"Load of each expert in each layer: {line.shot.label}"
        picture = expert_map(
            name, described, routings[-1], load_FLE, limits, UNIT, picks=picks, notes=notes
        )
        parts.append(panel(line.shot, picture, notes[-1]))
    return figure(
        title,
        slider(places),
        panels(parts, frames[0][1][0].num_experts),
        legend(limits, "load, as a multiple of an even share", clipped=clipped),
        note="Each cell is one expert: how many tokens selected it, against an even share (1).",
        wide=True,
    )


def load_title(shots: Sequence[Snapshot]) -> str:
    """A title that tells whether the load became more even, and in which run."""
    values = [_max_violation(shot.routing) for shot in shots]
    if len(shots) == 2 and shots[0].is_before:
        first, last = values
        verb = "stayed as even as before" if abs(last - first) <= 0.02 * abs(first) else (
            "became more even" if last < first else "became less even")  # fmt: skip
        return f"The load {verb} in {shots[1].run}: MaxVio {number(first)} → {number(last)}"
    return f"Load of each expert in each layer, MaxVio {listed(shots, values)}"
