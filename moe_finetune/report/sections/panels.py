"""Pictures of snapshots side by side, and the heat map of layers x experts."""

from __future__ import annotations

import numpy as np

from moe_finetune.report.charts.heatmap import heat_map
from moe_finetune.report.context import Snapshot
from moe_finetune.report.markup import Markup, tag


def panel(shot: Snapshot, picture: Markup, note: str | None = None) -> Markup:
    """Return one of several pictures that share a figure, under its snapshot's name."""
    head = tag("div", shot.name, tag("span", note, class_="note") if note else None, class_="head")
    return tag("div", head, picture, class_="panel")


def panels(parts: list[Markup], columns: int = 0, *, square: bool = False) -> Markup:
    """Return pictures side by side; many columns get wider panels, ``square`` keeps the shape."""
    kind = "square" if square else "broad" if columns > 48 else ""
    return tag("div", parts, class_=f"panels {kind}".strip())


def _layer_names(shot: Snapshot) -> list[str]:
    return [str(layer) for layer in shot.routing.layers]


def expert_names(shot: Snapshot) -> list[str]:
    """Return the experts' numbers as labels."""
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
        columns=expert_names(shot),
        row_name="layer",
        column_name="expert",
        limits=limits,
        unit=unit,
        differences=differences,
    )
