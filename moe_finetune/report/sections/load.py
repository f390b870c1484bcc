"""Load: how often each expert is selected, how that changed, how steeply it falls off."""

from collections.abc import Sequence

import numpy as np

from moe_finetune.report.charts.heatmap import legend, shared_limits
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.context import END, START, Report, Snapshot, Timeline, figure, listed
from moe_finetune.report.markup import Markup, number, tag
from moe_finetune.report.routing import Routing
from moe_finetune.report.sections.panels import expert_map, over_time, panel, panels, slider

LINES = 8  # layers drawn as curves
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


def load_change(report: Report) -> Markup | None:
    """Difference of relative load, after minus before, of each run."""
    changes = {}
    for line in report.timelines():
        start, end = line.routings.get(START), line.routings.get(END)
        if start is not None and end is not None and start.layers == end.layers:
            changes[line.shot] = end.relative_load_LE() - start.relative_load_LE()
    if not changes:
        return None
    reach = max(float(np.nanpercentile(np.abs(c), 99.5)) for c in changes.values()) or 1.0
    beyond = any(float(np.nanmax(np.abs(c))) > reach * 1.0001 for c in changes.values())
    parts, moved = [], []
    for shot, change_LE in changes.items():
        # half the sum of absolute changes: the share of dispatches that went to another expert
        share = f"{number(50 * float(np.nanmean(np.abs(change_LE))), 2)} %"
        moved.append(share if len(changes) == 1 else f"{share} ({shot.label})")
        picture = expert_map(
            f"Change of load: {shot.label}", f"{share} of all load moved between experts.",
            shot.routing, change_LE, (-reach, reach), UNIT, differences=True,
        )  # fmt: skip
        parts.append(panel(shot, picture, f"{share} moved"))
    return figure(
        f"Fine-tuning moved part of the load to other experts: {', '.join(moved)}",
        panels(parts, next(iter(changes)).routing.num_experts),
        legend(
            (-reach, reach), "change of load (after − before)", differences=True, clipped=beyond
        ),
        note="Blue: selected less often than before; orange: more often.",
        wide=True,
    )


def frequencies(shots: Sequence[Snapshot]) -> Markup:
    """Return the selection frequency of the experts of each layer, most selected first."""
    parts = []
    most = max(len(shot.routing.layers) for shot in shots)
    top = max(float(np.nanmax(shot.routing.relative_load_LE())) for shot in shots)
    for shot in shots:
        ranked_LE = -np.sort(-shot.routing.relative_load_LE(), axis=1)
        ranks = [float(e) for e in range(1, shot.routing.num_experts + 1)]
        last = max(1, len(ranked_LE) - 1)
        # a few layers, evenly spaced: more lines would be indistinguishable
        drawn = {round(i * last / (LINES - 1)) for i in range(LINES)} & set(range(len(ranked_LE)))
        series = [
            Series(
                f"layer {layer}",
                f"color-mix(in oklab, var(--shallow), var(--deep) {round(100 * i / last)}%)",
                ranks,
                ranked_LE[i].tolist(),
            )
            for i, layer in enumerate(shot.routing.layers)
            if i in drawn
        ]
        # a flat line at 1 is an even load; a long tail at 0 means unused experts
        chart = line_chart(
            f"Selection frequency, experts ranked in each layer: {shot.label}",
            f"The most selected expert has up to {number(top)} times an even share.",
            series,
            x_label="expert, most selected first",
            smooth=False,
            zero=True,
            reference=1.0,
            reference_label="even",
            y_reach=(0.0, top),
        )
        parts.append(panel(shot, chart))
    heads = listed(shots, [_top_share(shot) for shot in shots])
    few = f" ({LINES} of {most} layers)" if most > LINES else ""
    ends = [tag("span", "first layer"), tag("span", class_="bar depth"), tag("span", "last layer")]
    return figure(
        f"Load of the busiest eighth of the experts, times an even share: {heads}",
        panels(parts),
        tag("div", ends, class_="legend"),
        note=f"Selection frequency as a multiple of an even share, one line a layer{few}; the "
        "dashed level is an even load.",
        wide=True,
    )


def _top_share(shot: Snapshot) -> float:
    """Return the mean relative load of the busiest eighth of a layer's experts, over layers."""
    ranked_LE = -np.sort(-shot.routing.relative_load_LE(), axis=1)
    return float(np.nanmean(ranked_LE[:, : max(1, shot.routing.num_experts // 8)]))
