"""What the experts specialize in: domains, coherence, then pictures of single layers."""

import math
from collections import Counter
from typing import Any

import numpy as np

from moe_finetune.metrics.domains import domain_information
from moe_finetune.metrics.projections import spread_between
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import line_chart
from moe_finetune.report.charts.scatter import key, largest_groups, scatter
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
from moe_finetune.report.routing import reading
from moe_finetune.report.sections.panels import experts, panel, panels
from moe_finetune.report.sections.text import text

POINTS = 1500  # points of a scatter; more would hide each other
LEAST_SEPARATION = 0.05
"""Below this share of the variance, groups are not visible, however many points there are."""
SHUFFLES = 20

# name in a snapshot -> title, experts in color, what a picture shows, how to read it
SCATTERS = {
    "embeddings": (
        "PCA of embeddings", 3, "Tokens of the busiest experts",
        "Two principal components. Clusters of one color are tokens of one expert only.",
    ),
    "gate_rows_tsne": (
        "t-SNE of gate rows", 6, "Gate projection rows of single experts",
        "t-SNE. Clusters of one color are experts whose rows resemble no other expert's.",
    ),
}  # fmt: skip
Point = tuple[float, float, int]


def _render(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        return None
    parts = [_domains(report, shots), _coherence(report, shots)]
    parts += [_scatters(report, shots, name) for name in SCATTERS]
    parts += [text(report, shots)]
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


def _scatters(report: Report, shots: list[Snapshot], name: str) -> Markup | None:
    """The scatters of ``name``; folded if no panel has visible groups."""
    title, most, what, note = SCATTERS[name]
    points_of = {shot: points for shot in shots if (points := _read_points(shot, name))}
    if not points_of:
        report.note_missing(title, f"the snapshots have no '{name}'")
        return None
    # the same expert has the same color in every picture
    named = largest_groups([expert for _, _, expert in next(iter(points_of.values()))], most)
    parts, separations, visible = [], [], False
    for shot, points in points_of.items():
        sample = points if len(points) <= POINTS else points[:: -(-len(points) // POINTS)]
        sampled = None
        if len(sample) < len(points):
            sampled = f"{number(len(sample))} of {number(len(points))} points"
        separation, noise = _separation([p for p in points if p[2] in named])
        separations.append(separation)
        visible = visible or separation > noise
        counts = Counter(expert for _, _, expert in sample)
        described = ", ".join(f"expert {e}: {counts[e]} points" for e in named if counts[e])
        picture = scatter(f"{title}: {shot.label}", described, sample, named=named)
        parts.append(panel(shot, picture, sampled))
    values = listed(list(points_of), separations, 2)
    layer = next(iter(points_of)).routing.data[name].get("layer")
    where = f" in layer {layer}" if layer is not None else ""
    result = f"separation {values}" if visible else f"no visible structure (separation {values})"
    others = any(expert not in named for points in points_of.values() for _, _, expert in points)
    content = figure(
        f"{what}{where}: {result}",
        panels(parts, square=True),
        key(named, others=others),
        note=f"{note} Separation: the share of the spread that is between experts, 0 to 1.",
        wide=True,
    )
    if visible:
        return group(title, content)
    return folded(f"{title}: no visible structure", content)


def _separation(points: list[Point]) -> tuple[float, float]:
    """The between-expert share of the variance, and the largest share that chance may give.

    Chance is the largest share over shuffles of the labels, and at least :data:`LEAST_SEPARATION`.
    """
    finite = [point for point in points if math.isfinite(point[0] + point[1])]
    where_N2 = np.array([point[:2] for point in finite]).reshape(-1, 2)
    expert_N = np.array([point[2] for point in finite])
    rng = np.random.default_rng(0)
    shuffled = [spread_between(where_N2, rng.permutation(expert_N)) for _ in range(SHUFFLES)]
    return spread_between(where_N2, expert_N), max(LEAST_SEPARATION, *shuffled)


def _read_points(shot: Snapshot, name: str) -> list[Point]:
    entry: Any = shot.routing.data.get(name)
    if not entry:
        return []
    with reading(shot.routing.path, name):
        return [(math.nan if x is None else float(x), math.nan if y is None else float(y), int(e))
                for x, y, e in entry["points"]]  # fmt: skip


SPECIALIZATION = Section("specialization", "Specialization", _render)
