"""What the experts specialize in: domains, coherence, then the text of single layers."""

import numpy as np

from moe_finetune.metrics.domains import domain_information
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import line_chart
from moe_finetune.report.context import (
    Cell,
    Report,
    Section,
    Snapshot,
    figure,
    folded,
    group,
    listed,
    names,
    table,
)
from moe_finetune.report.markup import Markup, join, number
from moe_finetune.report.sections.panels import experts, panel, panels
from moe_finetune.report.sections.text import text


def _render(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        return None
    parts = [_domains(report, shots), _coherence(report, shots), text(report, shots)]
    return join(parts) if any(parts) else None


def _domains(report: Report, shots: list[Snapshot]) -> Markup | None:
    holders_counts = [
        (shot, domains, counts_GLE)
        for shot in shots
        for domains, counts_GLE in [shot.routing.domains() or ([], np.empty(0))]
        if len(domains) > 1
    ]
    if not holders_counts:
        remedy = "the snapshots have no counts for two or more domains ('domains')"
        report.note_missing("Experts by domain", remedy)
        return None
    holders = [shot for shot, _, _ in holders_counts]
    information = {
        shot.label: [
            domain_information(counts_GLE[:, layer])["mutual_information"]
            for layer in range(counts_GLE.shape[1])
        ]
        for shot, _, counts_GLE in holders_counts
    }
    row = int(np.argmax(information[holders[-1].label]))
    layer = holders[-1].routing.layers[row]
    shares = []
    for shot, _, counts_GLE in holders_counts:
        layers = shot.routing.layers
        counts_GE = counts_GLE[:, layers.index(layer) if layer in layers else row]
        shares.append(counts_GE / counts_GE.sum(1, keepdims=True))
    limits, clipped = shared_limits(shares)
    parts = []
    for (shot, domains, _), share_GE in zip(holders_counts, shares, strict=True):
        nats = number(information[shot.label][row])
        picture = heat_map(
            f"Share of each domain's choices, layer {layer}: {shot.label}",
            f"Mutual information of expert and domain: {nats} nats.",
            share_GE, rows=domains, columns=experts(share_GE.shape[1]), row_name="",
            column_name="expert", limits=limits,
        )  # fmt: skip
        parts.append(panel(shot, picture, f"{nats} nats"))
    values = listed(holders, [information[shot.label][row] for shot in holders])
    maps = figure(
        f"Experts separate the domains most in layer {layer}; mutual information: {values} nats",
        panels(parts, shares[0].shape[1]),
        legend(limits, "share of the domain's choices", clipped=clipped),
        note="Rows that differ are domains with their own experts.",
        wide=True,
    )
    series = [shot.by_layer(information[shot.label]) for shot in holders]
    means = [float(np.mean(information[shot.label])) for shot in holders]
    title = f"Mutual information of expert and domain, mean over layers: {listed(holders, means)}"
    curve = line_chart(
        "Mutual information in each layer", title, series, x_label="layer", smooth=False, zero=True
    )
    layered = figure(title, names(holders), curve, note="nats") if len(series[0].x) > 2 else None
    return group("Domains", maps, layered)


def _coherence(report: Report, shots: list[Snapshot]) -> Markup | None:
    known = {shot: coherence for shot in shots if (coherence := shot.routing.coherence())}
    if not known:
        remedy = "the snapshots have no expert outputs ('coherence')"
        report.note_missing("Coherence against the barrier", remedy)
        return None
    holders, barrier = list(known), next(iter(known.values())).barrier
    means = [float(np.mean(coherence.means)) for coherence in known.values()]
    side = "below" if means[-1] < barrier else "above"
    title = (
        f"Mutual coherence ends {side} the barrier of {number(barrier)} in {holders[-1].run}: "
        f"{listed(holders, means)}"
    )
    chart = line_chart(
        "Mutual coherence in each layer", title,
        [shot.by_layer(coherence.means) for shot, coherence in known.items()],
        x_label="layer", smooth=False, zero=True, reference=barrier, reference_label="barrier",
    )  # fmt: skip
    columns: list[Cell] = ["Snapshot", "Layer", "Mean", "Share of tokens below the barrier"]
    rows: list[list[Cell]] = [
        [shot.label, layer, number(mean), number(share)]
        for shot, coherence in known.items()
        for layer, mean, share in zip(
            shot.routing.layers, coherence.means, coherence.shares_below, strict=True
        )
    ]
    grid = folded("In numbers", table("Mutual coherence", columns, rows))
    note = (
        "Below the dashed barrier 1/(2k−1), a token's experts are guaranteed to be "
        "distinguishable; above it there is no such guarantee."
    )
    return group("Coherence", figure(title, names(holders), chart, grid, note=note, wide=True))


SPECIALIZATION = Section("specialization", "Specialization", _render)
