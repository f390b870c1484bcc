"""How the router spreads tokens: load, and the path from layer to layer."""

import math

import numpy as np

from moe_finetune.io.counted import counted
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
from moe_finetune.report.sections.load import load, load_title
from moe_finetune.report.sections.panels import (
    experts,
    over_time,
    panel,
    panels,
    slider,
)


def _render(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        remedy = "record the routing with `moe-finetune analyze CHECKPOINT --data FILE`"
        report.note_missing("Routing pictures", remedy)
        return None
    for run in report.runs:
        for when, routing in (("before", run.routing_before), ("after", run.routing_after)):
            if routing is None:
                remedy = f"no routing/{when}.json in its folder"
                report.note_missing(f"Routing {when} {run.label}", remedy)
    if not any(run.routing_steps for run in report.runs):
        report.note_missing("Routing during training", "no evaluation was made while training")
    return join([
        _measured(report, shots),
        group("Load", load(report.timelines(), load_title(shots))),
        _paths(report),
        folded("Layer by layer", _per_layer(shots)),
    ])  # fmt: skip


def _measured(report: Report, shots: list[Snapshot]) -> Markup:
    """The tokens on which the pictures were measured."""
    routing = shots[-1].routing
    facts = [counted(len(routing.layers), "MoE layer"), counted(routing.num_experts, "expert")]
    if routing.top_k:
        facts.append(f"{number(routing.top_k)} selected per token")
    tokens = dict.fromkeys(number(shot.routing.data.get("tokens")) for shot in shots)
    if DASH not in tokens:
        facts.append(f"measured on {' and '.join(tokens)} tokens")
    sentences = [f"{', '.join(facts)}."]
    if any(shot.routing.data.get("data") == "train" for shot in shots):
        sentences.append(
            "These are tokens of the training data, because the run had no data.validation; "
            "memorized text shows here as well."
        )
    if any(run.routing_steps for run in report.runs):
        sentences.append(
            "Steps during training were measured on the first batches of each evaluation: other "
            "tokens than before and after fine-tuning."
        )
    return tag("p", " ".join(sentences), class_="intro")


def _per_layer(shots: list[Snapshot]) -> Markup | None:
    """Every metric that is known for at least three layers, over depth."""
    metrics = {shot: shot.routing.metrics() for shot in shots}
    figures = []
    for name in dict.fromkeys(name for by_name in metrics.values() for name in by_name):
        metric_of = {
            shot: by_name[name]
            for shot, by_name in metrics.items()
            if name in by_name
            and 2 < len(shot.routing.layers) == len(by_name[name].per_layer or ())
        }
        if metric_of:
            about = word(f"routing/{name}")
            means = listed(list(metric_of), [metric.mean for metric in metric_of.values()])
            title = f"{about.name}, mean over layers: {means}"
            series = [shot.by_layer(metric.per_layer or []) for shot, metric in metric_of.items()]
            chart = line_chart(
                f"{about.name} in each layer", title, series, x_label="layer", smooth=False
            )
            figures.append(figure(title, chart, note=about.meaning or None))
    return join([names(shots), tag("div", figures, class_="grid")]) if figures else None


def _paths(report: Report) -> Markup | None:
    timelines = report.timelines()
    cells = max(line.shot.routing.num_experts for line in timelines) ** 2
    places, frames = over_time(timelines, cells, lambda r: r.conditional() is not None)
    if not frames:
        remedy = "the snapshots have no 'conditional_activation'"
        report.note_missing("Paths between adjacent layers", remedy)
        return None
    pairs = [[pair for r in routings if (pair := r.conditional())] for _, routings, _ in frames]
    matrices = [np.stack([matrix_EE for _, matrix_EE in of_run]) for of_run in pairs]
    limits, clipped = shared_limits(matrices)
    layer, next_layer = pairs[0][0][0]
    parts, changes = [], []
    for (line, routings, picks), matrix_FEE in zip(frames, matrices, strict=True):
        means = [_mean_maximum(matrix_EE) for matrix_EE in matrix_FEE]
        notes = [f"most likely: {number(means[i])} on average" for i in picks]
        numbers = experts(routings[0].num_experts)
        ends = dict.fromkeys((number(means[0]), number(means[-1])))
        changes.append(f"{' → '.join(ends)} ({line.shot.label})")
        picture = heat_map(
            f"Expert of the next layer given the expert of this one: {line.shot.label}",
            f"The most likely next expert has probability {number(means[-1])} on average.",
            matrix_FEE, rows=numbers, columns=numbers, row_name=f"expert, layer {layer}",
            column_name=f"expert, layer {next_layer}", limits=limits, picks=picks, notes=notes,
        )  # fmt: skip
        parts.append(panel(line.shot, picture, notes[-1]))
    return group(
        "Paths",
        figure(
            f"Given the expert in layer {layer}, the most likely one in layer {next_layer} has "
            f"probability {'; '.join(changes)}",
            slider(places),
            panels(parts, square=True),
            legend(limits, "P(expert in the next layer | expert in this layer)", clipped=clipped),
            note="Bright cells are frequent paths; rows sum to the number of experts per token.",
            wide=True,
        ),
    )


def _mean_maximum(matrix_EE: np.ndarray) -> float:
    used_EE = matrix_EE[matrix_EE.sum(1) > 0]
    return float(used_EE.max(1).mean()) if len(used_EE) else math.nan


ROUTING = Section("routing", "Routing", _render)
