"""Load: how often each expert is chosen, how that changed, how steeply it falls off."""

from __future__ import annotations

import numpy as np

from moe_finetune.report.charts.heatmap import legend, shared_limits
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.context import Report, Snapshot, figure, listed
from moe_finetune.report.markup import Markup, number, tag
from moe_finetune.report.sections.panels import expert_map, panel, panels

LINES = 8  # layers drawn as curves


def _max_violation(shot: Snapshot) -> float:
    return shot.routing.metrics()["max_violation"].mean


def load(shots: list[Snapshot]) -> Markup:
    """Return the load of every expert in every layer."""
    matrices = [shot.routing.relative_load_LE() for shot in shots]
    limits, clipped = shared_limits(matrices)
    parts = []
    for shot, matrix_LE in zip(shots, matrices, strict=True):
        busiest = np.unravel_index(np.nanargmax(matrix_LE), matrix_LE.shape)
        unused = int((matrix_LE == 0).sum())
        description = (
            f"MaxVio {number(_max_violation(shot))}. Busiest: expert {busiest[1]} in layer "
            f"{shot.routing.layers[busiest[0]]} with {number(float(matrix_LE[busiest]))} times an "
            f"even share. {unused} of {matrix_LE.size} never chosen."
        )
        picture = expert_map(
            f"Load per expert and layer: {shot.label}", description, shot, matrix_LE, limits,
            "× even share",
        )  # fmt: skip
        parts.append(panel(shot, picture, f"MaxVio {number(_max_violation(shot))}"))
    bar = legend(limits, "load, as a multiple of an even share", clipped=clipped)
    return figure(
        _load_title(shots),
        panels(parts, shots[0].routing.num_experts),
        bar,
        note="Each cell is one expert: how many tokens chose it, against an even share (1).",
        wide=True,
    )


def _load_title(shots: list[Snapshot]) -> str:
    """Say whether load became more even."""
    first, last = _max_violation(shots[0]), _max_violation(shots[-1])
    if len(shots) == 1:
        return f"Load per expert and layer: MaxVio {number(first)}"
    if not shots[0].before:
        values = [_max_violation(shot) for shot in shots]
        return f"Load per expert and layer, MaxVio: {listed(shots, values)}"
    if len(shots) == 2:
        verb = _compared(first, last, "more even", "less even", "as even")
        tail = "after fine-tuning" if verb != "as even" else "after fine-tuning as before"
        return f"Load is {verb} {tail}: MaxVio {number(first)} → {number(last)}"
    best = min(shots, key=_max_violation)
    where = "before fine-tuning" if best.before else f"after the run {best.run}"
    values = [_max_violation(shot) for shot in shots]
    return f"Load is most even {where}: MaxVio {listed(shots, values)}"


def _compared(first: float, last: float, less: str, more: str, same: str) -> str:
    if abs(last - first) <= 0.02 * max(abs(first), abs(last)):
        return same
    return less if last < first else more


def load_change(report: Report) -> Markup | None:
    """Difference of relative load, after minus before, of each run."""
    pairs = [
        (Snapshot(run.label, report.color(run), run.after, run.label), run)
        for run in report.runs
        if run.before is not None
        and run.after is not None
        and run.before.load_LE.shape == run.after.load_LE.shape
    ]
    if not pairs:
        return None
    changes = []
    for shot, run in pairs:
        assert run.before is not None
        changes.append(shot.routing.relative_load_LE() - run.before.relative_load_LE())
    reach = max(float(np.nanpercentile(np.abs(c), 99.5)) for c in changes) or 1.0
    beyond = any(float(np.nanmax(np.abs(c))) > reach * 1.0001 for c in changes)
    parts, moved = [], []
    for (shot, _), change_LE in zip(pairs, changes, strict=True):
        # half the sum of absolute changes: the share of dispatches that went to another expert
        moved.append(50 * float(np.nanmean(np.abs(change_LE))))
        share = f"{number(moved[-1], 2)} %"
        picture = expert_map(
            f"Change of load: {shot.label}",
            f"{share} of all load moved between experts.",
            shot, change_LE, (-reach, reach), "× even share", differences=True,
        )  # fmt: skip
        parts.append(panel(shot, picture, f"{share} moved"))
    told = " to ".join(dict.fromkeys(f"{number(part, 2)} %" for part in (min(moved), max(moved))))
    bar = legend(
        (-reach, reach), "change of load (after − before)", differences=True, clipped=beyond
    )
    return figure(
        f"Fine-tuning sent {told} of the load to other experts",
        panels(parts, pairs[0][0].routing.num_experts),
        bar,
        note="Blue: chosen less often than before; orange: more often.",
        wide=True,
    )


def frequencies(shots: list[Snapshot]) -> Markup:
    """Return the selection frequency of the experts of each layer, the most chosen first."""
    parts = []
    most = max(len(shot.routing.layers) for shot in shots)
    top = max(float(np.nanmax(shot.routing.relative_load_LE())) for shot in shots)
    for shot in shots:
        ranked_LE = -np.sort(-shot.routing.relative_load_LE(), axis=1)
        experts = [float(e) for e in range(1, shot.routing.num_experts + 1)]
        last = max(1, len(ranked_LE) - 1)
        # a few layers, evenly over the depth: more lines could not be told apart
        shown = {round(i * last / (LINES - 1)) for i in range(LINES)} & set(range(len(ranked_LE)))
        series = [
            Series(
                f"layer {layer}",
                f"color-mix(in oklab, var(--shallow), var(--deep) {round(100 * i / last)}%)",
                experts,
                ranked_LE[i].tolist(),
            )
            for i, layer in enumerate(shot.routing.layers)
            if i in shown
        ]
        # a flat line at 1 is an even load; a long tail at 0 are experts that nobody chooses
        chart = line_chart(
            f"Selection frequency, experts ranked in each layer: {shot.label}",
            f"The most chosen expert has up to {number(top)} times an even share.",
            series,
            x_label="expert, most chosen first",
            smooth=False,
            zero=True,
            reference=1.0,
            reference_label="even",
            y_reach=(0.0, top),
        )
        parts.append(panel(shot, chart))
    heads = listed(shots, [_top_share(shot) for shot in shots])
    return figure(
        f"Load of the busiest eighth of the experts, times an even share: {heads}",
        panels(parts),
        tag(
            "div",
            tag("span", "first layer"),
            tag("span", class_="bar depth"),
            tag("span", "last layer"),
            class_="legend",
        ),
        note="Selection frequency as a multiple of an even share, one line a layer"
        + (f" ({LINES} of {most} layers)" if most > LINES else "")
        + "; the dashed level is an even load.",
        wide=True,
    )


def _top_share(shot: Snapshot) -> float:
    """Return the mean relative load of the busiest eighth of a layer's experts, over layers."""
    ranked_LE = -np.sort(-shot.routing.relative_load_LE(), axis=1)
    return float(np.nanmean(ranked_LE[:, : max(1, shot.routing.num_experts // 8)]))
