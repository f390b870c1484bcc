"""What the experts are for: domains, coherence, then pictures of single layers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.metrics.domains import domain_information
from moe_finetune.metrics.projections import spread_between
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import line_chart
from moe_finetune.report.charts.scatter import key, largest_groups, scatter
from moe_finetune.report.context import (
    Report,
    Section,
    Snapshot,
    figure,
    group,
    listed,
    names,
    table,
)
from moe_finetune.report.markup import Markup, join, number, tag
from moe_finetune.report.sections.panels import panel, panels
from moe_finetune.report.sections.text import text


def _render(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        return None
    parts = [
        _domains(report, shots),
        _coherence(report, shots),
        points(report, shots, "embeddings", "Embeddings", 3),
        points(report, shots, "gate_rows_tsne", "Gate rows", 6),
        text(report, shots),
    ]
    return join(parts) if any(parts) else None


def _domains(report: Report, shots: list[Snapshot]) -> Markup | None:
    found = [(shot, shot.routing.domains()) for shot in shots]
    known = [(shot, pair) for shot, pair in found if pair is not None and len(pair[0]) > 1]
    if not known:
        report.lacks(
            "Experts by domain", "the snapshots hold no counts for two domains or more ('domains')"
        )
        return None
    information = {
        shot.label: [
            domain_information(counts_GLE[:, i])["mutual_information"]
            for i in range(counts_GLE.shape[1])
        ]
        for shot, (_, counts_GLE) in known
    }
    layer = int(np.argmax(information[known[-1][0].label]))
    name = known[-1][0].routing.layers[layer]
    shares = []
    for shot, (_, counts_GLE) in known:
        index = shot.routing.layers.index(name) if name in shot.routing.layers else layer
        counts_GE = counts_GLE[:, index]
        shares.append(counts_GE / counts_GE.sum(1, keepdims=True))
    limits, clipped = shared_limits(shares)
    parts = []
    for (shot, (domains, _)), share_GE in zip(known, shares, strict=True):
        nats = number(information[shot.label][layer])
        picture = heat_map(
            f"Share of each domain's choices, layer {name}: {shot.label}",
            f"Mutual information of expert and domain: {nats} nats.",
            share_GE,
            rows=domains,
            columns=[str(e) for e in range(share_GE.shape[1])],
            row_name="",
            column_name="expert",
            limits=limits,
        )
        parts.append(panel(shot, picture, f"{nats} nats"))
    holders = [shot for shot, _ in known]
    told = listed(holders, [information[shot.label][layer] for shot in holders])
    maps = figure(
        f"The experts separate the domains most in layer {name}; mutual information: {told} nats",
        panels(parts, shares[0].shape[1]),
        legend(limits, "share of the domain's choices", clipped=clipped),
        note="Rows that differ are domains with experts of their own.",
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
    known = [(shot, found) for shot in shots if (found := shot.routing.coherence())]
    if not known:
        report.lacks(
            "Coherence against the barrier", "the snapshots hold no expert outputs ('coherence')"
        )
        return None
    barrier = known[0][1][0].barrier
    means = [float(np.mean([c.mean for c in layers])) for _, layers in known]
    holders = [shot for shot, _ in known]
    values = listed(holders, means)
    side = "below" if means[-1] < barrier else "above"
    last = known[-1][0].run
    title = f"Mutual coherence ends {side} the barrier of {number(barrier)} in {last}: {values}"
    content: list[Markup] = [names(holders)]
    if len(known[0][1]) > 2:
        series = [
            shot.by_layer([c.mean for c in layers]) for shot, layers in known if len(layers) > 1
        ]
        content.append(
            line_chart(
                "Mutual coherence in each layer", title, series,
                x_label="layer", smooth=False, zero=True,
                reference=barrier, reference_label="barrier",
            )
        )  # fmt: skip
    rows: list[list[object]] = [
        [shot.label, c.name, number(c.mean), number(c.barrier), number(c.share_below)]
        for shot, layers in known
        for c in layers
    ]
    columns: list[object] = ["Snapshot", "Layer", "Mean", "Barrier", "Share of tokens below"]
    grid = table("Mutual coherence", columns, rows)
    content.append(tag("details", tag("summary", "In numbers"), grid) if len(content) > 1 else grid)
    note = (
        "Below the dashed barrier 1/(2k−1) a token's experts can certainly be told apart; above "
        "it there is no such guarantee."
    )
    return group("Coherence", figure(title, *content, note=note, wide=True))


SPECIALIZATION = Section("specialization", "Specialization", _render)


POINTS = 1500  # of a scatter; more only hide one another
Point = tuple[float, float, int]


def points(
    report: Report, shots: list[Snapshot], name: str, title: str, most: int
) -> Markup | None:
    """Return the scatters of ``name``, the ``most`` most frequent experts in colour."""
    known = [(s, s.routing.data[name]) for s in shots if _has_points(s.routing.data.get(name))]
    if not known:
        report.lacks(
            {"embeddings": "PCA of embeddings", "gate_rows_tsne": "t-SNE of gate rows"}[name],
            f"the snapshots hold no '{name}'",
        )
        return None
    named: list[int] = []
    parts, separations = [], []
    others = False
    for shot, data in known:
        found = _read_points(shot, name, data)
        # the same expert keeps its colour in every picture
        named = named or largest_groups([p[2] for p in found], most)
        others = others or any(p[2] not in named for p in found)
        shown = found if len(found) <= POINTS else found[:: -(-len(found) // POINTS)]
        note = None
        if len(shown) < len(found):
            note = f"{number(len(shown))} of {number(len(found))} points"
        kept = [p for p in found if p[2] in named and math.isfinite(p[0] + p[1])]
        where_N2 = np.array([p[:2] for p in kept]).reshape(-1, 2)
        separations.append(spread_between(where_N2, np.array([p[2] for p in kept])))
        counts = Counter(p[2] for p in shown)
        listing = ", ".join(f"expert {e}: {counts[e]} points" for e in named if counts[e])
        picture = scatter(f"{title}: {shot.label}", listing, shown, named=named)
        parts.append(panel(shot, picture, note))
    layer = known[0][1].get("layer") if isinstance(known[0][1], dict) else None
    where = f", layer {layer}" if layer is not None else ""
    told = listed([shot for shot, _ in known], separations, 2)
    if name == "embeddings":
        heading = f"Tokens of the {len(named)} busiest experts{where}, separation {told}"
        note = "Two principal components. Clusters of one colour are tokens of one expert only."
    else:
        heading = f"Gate projection rows of single experts{where}, separation {told}"
        note = "t-SNE. Clusters of one colour are experts whose rows resemble no other expert's."
    note += " Separation: the share of the spread that lies between experts, 0 to 1."
    content = figure(
        heading, panels(parts, square=True), key(named, others=others), note=note, wide=True
    )
    return group(title, content)


def _has_points(data: Any) -> bool:
    return bool(data.get("points") if isinstance(data, dict) else data)


def _read_points(shot: Snapshot, name: str, data: Any) -> list[Point]:
    try:
        rows = data["points"] if isinstance(data, dict) else data
        return [(_float(x), _float(y), int(e)) for x, y, e in rows]
    except (TypeError, ValueError, KeyError) as error:
        raise TraceError(
            f"{shot.routing.path}: '{name}.points' must be a list of [x, y, expert] ({error})"
        ) from None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)
