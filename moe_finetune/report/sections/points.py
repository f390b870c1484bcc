"""Tokens' embeddings and experts' gate rows as points in the plane."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from moe_finetune.errors import TraceError
from moe_finetune.metrics.projections import spread_between
from moe_finetune.report.charts.scatter import key, largest_groups, scatter
from moe_finetune.report.context import Report, Snapshot, figure, group, listed
from moe_finetune.report.markup import Markup, number
from moe_finetune.report.sections.panels import panel, panels

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
