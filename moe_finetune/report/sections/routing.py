"""How the router spreads tokens: load, probabilities, and the path from layer to layer."""

from __future__ import annotations

import math

import numpy as np

from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.context import Report, Section, Snapshot, figure, group, listed, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.words import word


def _render(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        report.lacks(
            "Routing pictures",
            "record the routing with `moe-finetune analyze CHECKPOINT --data FILE`",
        )
        return None
    for run in report.runs:
        if run.before is None:
            report.lacks(f"Routing before {run.label}", "no routing/before.json in its folder")
        if run.after is None:
            report.lacks(f"Routing after {run.label}", "no routing/after.json in its folder")
    pictures = [
        group("Load", _load(shots), _load_change(report), _frequencies(shots)),
        _probabilities(report, shots),
        _per_layer(report, shots),
        _conditional(report, shots),
    ]
    return join([*pictures, _metrics(report, shots)])


def panel(shot: Snapshot, picture: Markup, note: str | None = None) -> Markup:
    """Return one of several pictures that share a figure, under its snapshot's name."""
    head = tag("div", shot.name, tag("span", note, class_="note") if note else None, class_="head")
    return tag("div", head, picture, class_="panel")


def panels(parts: list[Markup], columns: int) -> Markup:
    """Return pictures side by side; those with many columns get wider panels."""
    return tag("div", parts, class_="panels broad" if columns > 48 else "panels")


def _layer_names(shot: Snapshot) -> list[str]:
    return [str(layer) for layer in shot.routing.layers]


def _expert_names(shot: Snapshot) -> list[str]:
    return [str(e) for e in range(shot.routing.num_experts)]


def expert_map(
    title: str,
    description: str,
    shot: Snapshot,
    matrix_LE: np.ndarray,
    limits: tuple[float, float],
    unit: str = "",
    differences: bool = False,
) -> Markup:
    """Return a heat map of layers x experts."""
    return heat_map(
        title,
        description,
        matrix_LE,
        rows=_layer_names(shot),
        columns=_expert_names(shot),
        row_name="layer",
        column_name="expert",
        limits=limits,
        unit=unit,
        differences=differences,
    )


def _max_violation(shot: Snapshot) -> float:
    return shot.routing.metrics()["max_violation"].mean


def _load(shots: list[Snapshot]) -> Markup:
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
    where = "before fine-tuning" if best.before else f"after {best.run}"
    values = [_max_violation(shot) for shot in shots]
    return f"Load is most even {where}: MaxVio {listed(shots, values)}"


def _compared(first: float, last: float, less: str, more: str, same: str) -> str:
    if abs(last - first) <= 0.02 * max(abs(first), abs(last)):
        return same
    return less if last < first else more


def _load_change(report: Report) -> Markup | None:
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
        share = float(np.nanmean(np.abs(change_LE)) / 2)
        moved.append(f"{number(100 * share, 2)} %")
        picture = expert_map(
            f"Change of load: {shot.label}",
            f"{moved[-1]} of all load moved between experts.",
            shot, change_LE, (-reach, reach), "× even share", differences=True,
        )  # fmt: skip
        parts.append(panel(shot, picture, f"{moved[-1]} moved"))
    return figure(
        f"Fine-tuning moved {' and '.join(moved)} of the load to other experts"
        if len(moved) <= 2
        else f"Fine-tuning moved {', '.join(moved)} of the load to other experts",
        panels(parts, pairs[0][0].routing.num_experts),
        legend(
            (-reach, reach), "change of load (after − before)", differences=True, clipped=beyond
        ),
        note="Blue: chosen less often than before; orange: more often.",
        wide=True,
    )


def _probabilities(report: Report, shots: list[Snapshot]) -> Markup | None:
    found = [(shot, shot.routing.matrix("mean_probability")) for shot in shots]
    known = [(shot, matrix) for shot, matrix in found if matrix is not None]
    if not known:
        report.lacks("Mean routing probabilities", "the snapshots hold no 'mean_probability'")
        return None
    limits, clipped = shared_limits([matrix for _, matrix in known])
    parts = []
    for shot, matrix_LE in known:
        top = float(np.nanmax(matrix_LE))
        picture = expert_map(
            f"Mean probability per expert and layer: {shot.label}",
            f"From {number(float(np.nanmin(matrix_LE)))} to {number(top)}; even would be "
            f"{number(1 / shot.routing.num_experts)}.",
            shot, matrix_LE, limits,
        )  # fmt: skip
        parts.append(panel(shot, picture, f"up to {number(top, 2)}"))
    even = number(1 / known[0][0].routing.num_experts)
    tops = listed([s for s, _ in known], [float(np.nanmax(m)) for _, m in known])
    return group(
        "Probabilities",
        figure(
            f"Highest mean probability of an expert: {tops} against an even {even}",
            panels(parts, known[0][0].routing.num_experts),
            legend(limits, "mean probability before top-k", clipped=clipped),
            wide=True,
        ),
    )


def _frequencies(shots: list[Snapshot]) -> Markup:
    """Selection frequency of the experts of each layer, the most chosen first."""
    parts = []
    top = max(float(np.nanmax(shot.routing.relative_load_LE())) for shot in shots)
    for shot in shots:
        ranked_LE = -np.sort(-shot.routing.relative_load_LE(), axis=1)
        experts = [float(e) for e in range(1, shot.routing.num_experts + 1)]
        last = max(1, len(ranked_LE) - 1)
        series = [
            Series(
                f"layer {layer}",
                f"color-mix(in oklab, var(--shallow), var(--deep) {round(100 * i / last)}%)",
                experts,
                ranked_LE[i].tolist(),
            )
            for i, layer in enumerate(shot.routing.layers)
        ]
        # a flat line at 1 is an even load; a long tail at 0 are experts that nobody chooses
        chart = line_chart(
            f"Selection frequency, experts ranked in each layer: {shot.label}",
            f"The most chosen expert has up to {number(top)} times an even share.",
            [*series],
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
        panels(parts, 0),
        tag(
            "div",
            tag("span", "first layer"),
            tag("span", class_="bar depth"),
            tag("span", "last layer"),
            class_="legend",
        ),
        note="Selection frequency as a multiple of an even share, one line a layer; "
        "the dashed level is an even load.",
        wide=True,
    )


def _top_share(shot: Snapshot) -> float:
    """Return the mean relative load of the busiest eighth of a layer's experts, over layers."""
    ranked_LE = -np.sort(-shot.routing.relative_load_LE(), axis=1)
    return float(np.nanmean(ranked_LE[:, : max(1, shot.routing.num_experts // 8)]))


def _per_layer(report: Report, shots: list[Snapshot]) -> Markup | None:
    """Every metric that is known for each layer, over depth."""
    names = dict.fromkeys(
        name
        for shot in shots
        for name, metric in shot.routing.metrics().items()
        if metric.per_layer and len(metric.per_layer) == len(shot.routing.layers) > 1
    )
    figures = []
    for name in names:
        series, means, holders = [], [], []
        for shot in shots:
            metric = shot.routing.metrics().get(name)
            if metric is None or not metric.per_layer:
                continue
            layers = [float(layer) for layer in shot.routing.layers]
            if len(metric.per_layer) != len(layers):
                continue
            kind = "before" if shot.before else ""
            series.append(Series(shot.label, shot.color, layers, metric.per_layer, kind))
            means.append(metric.mean)
            holders.append(shot)
        about = word(f"routing/{name}")
        title = f"{about.name}, mean over layers: {listed(holders, means)}"
        chart = line_chart(
            f"{about.name} in each layer", title, series, x_label="layer", smooth=False
        )
        figures.append(figure(title, chart, note=about.meaning or None))
    if not figures:
        return None
    key = tag("ul", [tag("li", shot.name) for shot in shots], class_="key")
    return group("Layer by layer", key, tag("div", figures, class_="grid"))


def _conditional(report: Report, shots: list[Snapshot]) -> Markup | None:
    found = [(shot, shot.routing.conditional()) for shot in shots]
    known = [(shot, pair) for shot, pair in found if pair is not None]
    if not known:
        report.lacks(
            "Conditional activation of adjacent layers",
            "the snapshots hold no 'conditional_activation'",
        )
        return None
    limits, clipped = shared_limits([matrix for _, (_, matrix) in known])
    parts, tops = [], []
    for shot, (layers, matrix_EE) in known:
        used_EE = matrix_EE[matrix_EE.sum(1) > 0]
        tops.append(float(used_EE.max(1).mean()) if len(used_EE) else math.nan)
        picture = heat_map(
            f"Next layer's expert given this layer's: {shot.label}",
            f"The likeliest next expert has probability {number(tops[-1])} on average.",
            matrix_EE,
            rows=_expert_names(shot),
            columns=_expert_names(shot),
            row_name=f"expert, layer {layers[0]}",
            column_name=f"expert, layer {layers[1]}",
            limits=limits,
        )
        parts.append(panel(shot, picture, f"mean maximum {number(tops[-1])}"))
    layers = known[0][1][0]
    return group(
        "Paths",
        figure(
            f"Knowing the expert in layer {layers[0]}, the likeliest one in layer {layers[1]} has "
            f"probability {listed([shot for shot, _ in known], tops)}",
            panels(parts, 0),
            legend(limits, "P(expert in the next layer | expert in this layer)", clipped=clipped),
            note="Bright cells are habitual paths; rows sum to the number of experts a token uses.",
            wide=True,
        ),
    )


def _metrics(report: Report, shots: list[Snapshot]) -> Markup:
    names = dict.fromkeys(name for shot in shots for name in shot.routing.metrics())
    rows: list[list[object]] = []
    keys: list[list[float | str | None]] = []
    for name in names:
        about = word(f"routing/{name}")
        cell = join([about.name, tag("span", about.meaning, class_="note")])
        values = [shot.routing.metrics().get(name) for shot in shots]
        rows.append([cell, *(number(v.mean) if v else DASH for v in values)])
        keys.append([about.name, *(v.mean if v and v.mean == v.mean else None for v in values)])
    columns: list[object] = ["Metric", *(shot.label for shot in shots)]
    return group(
        "All routing metrics",
        table("Routing metrics, means over layers", columns, rows, sortable=True, keys=keys),
    )


ROUTING = Section("routing", "Routing", _render)
