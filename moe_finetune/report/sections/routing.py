"""How the router spreads tokens: load, probabilities, and the path from layer to layer."""

from __future__ import annotations

import math

import numpy as np

from moe_finetune.metrics.words import word
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.context import Report, Section, Snapshot, figure, group, listed, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.sections.load import frequencies, load, load_change
from moe_finetune.report.sections.panels import expert_map, expert_names, panel, panels


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
        group("Load", load(shots), load_change(report), frequencies(shots)),
        _probabilities(report, shots),
        _per_layer(report, shots),
        _conditional(report, shots),
    ]
    return join([_measured(shots), *pictures, _metrics(report, shots)])


def _measured(shots: list[Snapshot]) -> Markup:
    """Say on what the pictures rest."""
    routing = shots[-1].routing
    facts = [f"{number(len(routing.layers))} MoE layers", f"{number(routing.num_experts)} experts"]
    if routing.top_k:
        facts.append(f"{number(routing.top_k)} chosen per token")
    tokens = dict.fromkeys(number(s.routing.data.get("tokens")) for s in shots)
    if DASH not in tokens:
        facts.append(f"measured on {' and '.join(tokens)} tokens")
    trained = any(shot.routing.data.get("data") == "train" for shot in shots)
    warning = (
        " They are of the training data, because the run had no data.validation: what is learned "
        "by heart shows here as well."
    )
    return tag("p", ", ".join(facts) + ".", warning if trained else None, class_="intro")


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
            rows=expert_names(shot),
            columns=expert_names(shot),
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
            panels(parts, square=True),
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
