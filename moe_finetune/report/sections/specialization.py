"""What the experts are for: domains, embeddings, gate rows, coherence, text by expert."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from moe_finetune.metrics.domains import domain_information
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.charts.scatter import SHAPES, group_color, key, largest_groups, scatter
from moe_finetune.report.context import Report, Section, Snapshot, figure, group, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.sections.routing import panel, panels

POINTS = 1500  # of a scatter; more only hide one another
TOKENS = 600  # of coloured text per snapshot
COLORED = 6


def _render(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        return None
    parts = [
        _domains(report, shots),
        _coherence(report, shots),
        _points(report, shots, "embeddings", "Embeddings", 3),
        _points(report, shots, "gate_rows_tsne", "Gate rows", len(SHAPES)),
        _text(report, shots),
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
    for (shot, (names, _)), share_GE in zip(known, shares, strict=True):
        told = number(information[shot.label][layer])
        picture = heat_map(
            f"Share of each domain's choices, layer {name}: {shot.label}",
            f"Mutual information of expert and domain: {told} nats.",
            share_GE,
            rows=names,
            columns=[str(e) for e in range(share_GE.shape[1])],
            row_name="",
            column_name="expert",
            limits=limits,
        )
        parts.append(panel(shot, picture, f"{told} nats"))
    listed = " → ".join(number(information[shot.label][layer]) for shot, _ in known)
    maps = figure(
        f"Experts part the domains most in layer {name}: {listed} nats of mutual information",
        panels(parts, shares[0].shape[1]),
        legend(limits, "share of the domain's choices", clipped=clipped),
        note="Rows that differ are domains with experts of their own.",
        wide=True,
    )
    series = [
        Series(
            shot.label,
            shot.color,
            [float(layer) for layer in shot.routing.layers],
            information[shot.label],
            dashed=shot.label.startswith("Before"),
            behind=shot.label.startswith("Before"),
        )
        for shot, _ in known
    ]
    means = " → ".join(number(float(np.mean(information[shot.label]))) for shot, _ in known)
    title = f"Mutual information of expert and domain, mean over layers: {means} nats"
    curve = line_chart(
        "Mutual information in each layer", title, series, x_label="layer", smooth=False, zero=True
    )
    return group("Domains", maps, figure(title, curve) if len(series[0].x) > 1 else None)


def _coherence(report: Report, shots: list[Snapshot]) -> Markup | None:
    known = [(shot, found) for shot in shots if (found := shot.routing.coherence())]
    if not known:
        report.lacks(
            "Coherence against the barrier", "the snapshots hold no expert outputs ('coherence')"
        )
        return None
    barrier = known[0][1][0].barrier
    means = [float(np.mean([c.mean for c in layers])) for _, layers in known]
    listed = " → ".join(number(m) for m in means)
    side = "below" if means[-1] < barrier else "above"
    title = f"Mutual coherence is {side} the barrier of {number(barrier)}: {listed}"
    content: list[Markup] = []
    if len(known[0][1]) > 1:
        series = [
            Series(
                shot.label,
                shot.color,
                [float(layer) for layer in shot.routing.layers],
                [c.mean for c in layers],
                dashed=shot.label.startswith("Before"),
                behind=shot.label.startswith("Before"),
            )
            for shot, layers in known
            if len(layers) > 1
        ]
        content.append(
            line_chart(
                "Mutual coherence in each layer", title, series,
                x_label="layer", smooth=False, zero=True, reference=barrier,
            )
        )  # fmt: skip
    rows: list[list[object]] = [
        [shot.label, c.name, number(c.mean), number(c.barrier), number(c.share_below)]
        for shot, layers in known
        for c in layers
    ]
    columns: list[object] = ["Snapshot", "Layer", "Mean", "Barrier", "Share of tokens below"]
    grid = table("Mutual coherence", columns, rows)
    content.append(tag("details", tag("summary", "In numbers"), grid) if content else grid)
    note = (
        "Below the dashed barrier 1/(2k−1) a token's experts are sure to be told apart; above it "
        "they may be."
    )
    return group("Coherence", figure(title, *content, note=note, wide=True))


def _points(
    report: Report, shots: list[Snapshot], name: str, title: str, most: int
) -> Markup | None:
    known = [(shot, shot.routing.data[name]) for shot in shots if shot.routing.data.get(name)]
    if not known:
        report.lacks(
            {"embeddings": "PCA of embeddings", "gate_rows_tsne": "t-SNE of gate rows"}[name],
            f"the snapshots hold no '{name}'",
        )
        return None
    named: list[int] = []
    parts = []
    others = False
    for shot, data in known:
        points = _read_points(data)
        # the same expert keeps its colour in every picture
        named = named or largest_groups([p[2] for p in points], most)
        others = others or any(p[2] not in named for p in points)
        shown = points if len(points) <= POINTS else points[:: -(-len(points) // POINTS)]
        note = None
        if len(shown) < len(points):
            note = f"{number(len(shown))} of {number(len(points))} points"
        picture = scatter(
            f"{title}: {shot.label}",
            f"{len(shown)} points in the plane; " + _separation(shown, named),
            shown,
            named=named,
        )
        parts.append(panel(shot, picture, note))
    layer = known[0][1].get("layer") if isinstance(known[0][1], dict) else None
    where = f", layer {layer}" if layer is not None else ""
    if name == "embeddings":
        heading = f"Tokens of the {len(named)} busiest experts{where}, two principal components"
        note = "Clusters of one colour are tokens that an expert has for itself."
    else:
        heading = f"Gate projection rows of single experts{where}, by t-SNE"
        note = "Clusters of one colour are experts whose rows resemble each other and no other's."
    content = figure(heading, panels(parts, 0), key(named, others=others), note=note, wide=True)
    return group(title, content)


def _read_points(data: Any) -> list[tuple[float, float, int]]:
    points = data["points"] if isinstance(data, dict) else data
    return [
        (float("nan") if x is None else float(x), float("nan") if y is None else float(y), int(e))
        for x, y, e in points
    ]


def _separation(points: list[tuple[float, float, int]], named: list[int]) -> str:
    counts = Counter(p[2] for p in points)
    return ", ".join(f"expert {e}: {counts[e]}" for e in named if counts[e])


def _text(report: Report, shots: list[Snapshot]) -> Markup | None:
    known = [
        (s, s.routing.data["colored_text"]) for s in shots if s.routing.data.get("colored_text")
    ]
    if not known:
        report.lacks("Text by chosen expert", "the snapshots hold no 'colored_text'")
        return None
    named: list[int] = []
    parts = []
    for shot, texts in known:
        experts = [e for text in texts for e in text["experts"]]
        named = named or largest_groups(experts, COLORED)
        parts.append(panel(shot, join([_passages(texts, named), _favourites(texts, shot)])))
    layers = {text.get("layer") for _, texts in known for text in texts} - {None}
    where = f" in layer {layers.pop()}" if len(layers) == 1 else ""
    legend_entries = [
        tag("li", tag("mark", f"expert {e}", style=f"--c:{group_color(rank)}"))
        for rank, e in enumerate(named)
    ]
    content = figure(
        f"Each token in the colour of its first expert{where}",
        tag("ul", [*legend_entries, tag("li", "others: no colour")], class_="key"),
        tag("div", parts, class_="panels broad"),
        note="Does an expert keep to kinds of words?",
        wide=True,
    )
    return group("Text", content)


def _passages(texts: list[dict[str, Any]], named: list[int]) -> Markup:
    shown, left = [], TOKENS
    for text in texts:
        pairs = list(zip(text["tokens"], text["experts"], strict=False))[:left]
        left -= len(pairs)
        spans = [
            tag("mark", token, style=f"--c:{group_color(named.index(e))}", data_tip=f"expert {e}")
            if e in named
            else tag("span", token, data_tip=f"expert {e}")
            for token, e in pairs
        ]
        if spans:
            shown.append(tag("p", spans, class_="passage"))
    return join(shown)


def _favourites(texts: list[dict[str, Any]], shot: Snapshot) -> Markup:
    """The most frequent tokens of each expert: the same picture for those who cannot see colour."""
    tokens: dict[int, Counter[str]] = {}
    for text in texts:
        for token, e in zip(text["tokens"], text["experts"], strict=False):
            if str(token).strip():
                tokens.setdefault(e, Counter())[str(token).strip()] += 1
    ordered = sorted(tokens.items(), key=lambda item: -sum(item[1].values()))
    rows: list[list[object]] = [
        [f"expert {e}", number(sum(count.values())), ", ".join(t for t, _ in count.most_common(8))]
        for e, count in ordered
    ]
    columns: list[object] = ["Expert", "Tokens", "Most frequent"]
    grid = table(f"Tokens of each expert: {shot.label}", columns, rows or [[DASH, DASH, DASH]])
    return tag("details", tag("summary", "Tokens of each expert"), grid)


SPECIALIZATION = Section("specialization", "Specialization", _render)
