"""How the router spreads tokens: load, probabilities, and the path from layer to layer."""

from __future__ import annotations

import math

import numpy as np

from moe_finetune.metrics.words import word
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import line_chart
from moe_finetune.report.context import (
    Report,
    Section,
    Snapshot,
    figure,
    folded,
    group,
    listed,
    names,
)
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.sections.load import frequencies, load, load_change, load_title
from moe_finetune.report.sections.panels import (
    expert_map,
    experts,
    over_time,
    panel,
    panels,
    slider,
)


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
    if not any(run.routing_steps for run in report.runs):
        report.lacks("Routing during training", "no evaluation was made while training")
    return join(
        [
            _measured(report, shots),
            group("Load", load(report.timelines(), load_title(shots))),
            _paths(report),
            folded("Change of load, expert by expert", load_change(report)),
            folded("How steeply the load falls off", frequencies(shots)),
            folded("Mean routing probabilities", _probabilities(report, shots)),
            folded("Layer by layer", _per_layer(shots)),
        ]
    )


def _measured(report: Report, shots: list[Snapshot]) -> Markup:
    """Say on what the pictures rest."""
    routing = shots[-1].routing
    facts = [f"{number(len(routing.layers))} MoE layers", f"{number(routing.num_experts)} experts"]
    if routing.top_k:
        facts.append(f"{number(routing.top_k)} chosen per token")
    tokens = dict.fromkeys(number(s.routing.data.get("tokens")) for s in shots)
    if DASH not in tokens:
        facts.append(f"measured on {' and '.join(tokens)} tokens")
    sentences = [f"{', '.join(facts)}."]
    if any(shot.routing.data.get("data") == "train" for shot in shots):
        sentences.append(
            "These are tokens of the training data, because the run had no data.validation: what "
            "was learned by heart shows here as well."
        )
    if any(run.routing_steps for run in report.runs):
        sentences.append(
            "The steps in between were measured on the first batches of each evaluation: other "
            "tokens than before and after fine-tuning."
        )
    return tag("p", " ".join(sentences), class_="intro")


def _probabilities(report: Report, shots: list[Snapshot]) -> Markup | None:
    found = [(shot, shot.routing.matrix("mean_probability")) for shot in shots]
    known = [(shot, matrix) for shot, matrix in found if matrix is not None]
    if not known:
        report.lacks("Mean routing probabilities", "the snapshots hold no 'mean_probability'")
        return None
    limits, clipped = shared_limits([matrix for _, matrix in known])
    even = number(1 / known[0][0].routing.num_experts)
    parts = []
    for shot, matrix_LE in known:
        least, top = (number(float(end(matrix_LE))) for end in (np.nanmin, np.nanmax))
        picture = expert_map(
            f"Mean probability of each expert in each layer: {shot.label}",
            f"From {least} to {top}; even would be {even}.",
            shot.routing, matrix_LE, limits,
        )  # fmt: skip
        parts.append(panel(shot, picture, f"up to {top}"))
    tops = listed([s for s, _ in known], [float(np.nanmax(m)) for _, m in known])
    return figure(
        f"Highest mean probability of an expert: {tops} against an even {even}",
        panels(parts, known[0][0].routing.num_experts),
        legend(limits, "mean probability before top-k", clipped=clipped),
        wide=True,
    )


def _per_layer(shots: list[Snapshot]) -> Markup | None:
    """Every metric that is known for each of three layers or more, over depth."""
    by_shot = [(shot, shot.routing.metrics()) for shot in shots]
    figures = []
    for name in dict.fromkeys(name for _, metrics in by_shot for name in metrics):
        series, means, holders = [], [], []
        for shot, metrics in by_shot:
            metric, layers = metrics.get(name), shot.routing.layers
            if metric and len(layers) > 2 and len(metric.per_layer or ()) == len(layers):
                series.append(shot.by_layer(metric.per_layer or []))
                means.append(metric.mean)
                holders.append(shot)
        if series:
            about = word(f"routing/{name}")
            title = f"{about.name}, mean over layers: {listed(holders, means)}"
            chart = line_chart(
                f"{about.name} in each layer", title, series, x_label="layer", smooth=False
            )
            figures.append(figure(title, chart, note=about.meaning or None))
    if not figures:
        return None
    return join([names(shots), tag("div", figures, class_="grid")])


def _paths(report: Report) -> Markup | None:
    timelines = report.timelines()
    cells = max(line.shot.routing.num_experts for line in timelines) ** 2
    places, frames = over_time(timelines, cells, lambda r: r.conditional() is not None)
    if not frames:
        report.lacks(
            "Paths between adjacent layers", "the snapshots hold no 'conditional_activation'"
        )
        return None
    found = [[pair for r in routings if (pair := r.conditional())] for _, routings, _ in frames]
    matrices = [np.stack([matrix_EE for _, matrix_EE in pairs]) for pairs in found]
    limits, clipped = shared_limits(matrices)
    below, above = found[0][0][0]
    parts, tops = [], []
    for (line, routings, picks), matrix_FEE in zip(frames, matrices, strict=True):
        means = [_mean_maximum(matrix_EE) for matrix_EE in matrix_FEE]
        notes = [f"the likeliest: {number(means[i])} on average" for i in picks]
        numbers = experts(routings[0].num_experts)
        tops.append((line.shot.label, means))
        picture = heat_map(
            f"Expert of the next layer given the expert of this one: {line.shot.label}",
            f"The likeliest next expert has probability {number(means[-1])} on average.",
            matrix_FEE, rows=numbers, columns=numbers, row_name=f"expert, layer {below}",
            column_name=f"expert, layer {above}", limits=limits, picks=picks, notes=notes,
        )  # fmt: skip
        parts.append(panel(line.shot, picture, notes[-1]))
    told = "; ".join(
        f"{' → '.join(dict.fromkeys((number(means[0]), number(means[-1]))))} ({label})"
        for label, means in tops
    )
    return group(
        "Paths",
        figure(
            f"Knowing the expert in layer {below}, the likeliest one in layer {above} has "
            f"probability {told}",
            slider(places),
            panels(parts, square=True),
            legend(limits, "P(expert in the next layer | expert in this layer)", clipped=clipped),
            note="Bright cells are habitual paths; rows sum to the number of experts a token uses.",
            wide=True,
        ),
    )


def _mean_maximum(matrix_EE: np.ndarray) -> float:
    used_EE = matrix_EE[matrix_EE.sum(1) > 0]
    return float(used_EE.max(1).mean()) if len(used_EE) else math.nan


ROUTING = Section("routing", "Routing", _render)
