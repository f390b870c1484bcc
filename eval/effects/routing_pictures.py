"""Pictures of the change in routing: P0's Figure 1, and overlap against balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from eval.effects.shards import Shard

Probes = Sequence[Mapping[str, float]]
PAIRS = (("balance_0.02", "ov"), ("aux_loss", "orthogonal_variance"))
"""The runs with only a balance loss and with P0's method, by study."""
PANELS = (
    ("score_variance", "score variance (eq. 7)"),
    ("max_violation", "MaxVio"),
    ("expert_overlap", "expert overlap (eq. 41)"),
)


PLACES = [
    (5 * x, y, side) for y in (2, -9, 11, -18, 20) for x, side in ((1, "left"), (-1, "right"))
]
"""Offsets of a point's label, in points; the first that covers no other label is used."""


def draw_routing(results: Mapping[Shard, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the pictures that have results; return ``p0_figure1.png`` and ``frontier.png``."""
    runs: dict[str, list[Probes]] = {}
    for shard, result in results.items():
        if shard.part == "finetune":
            runs.setdefault(shard.arm, []).append(result["probes"])
    pictures = [
        draw_figure1(runs[balance], runs[method], folder / "p0_figure1.png")
        for balance, method in PAIRS
        if {balance, method} <= runs.keys()
    ]
    if len(runs) > 2:
        pictures.append(draw_frontier(runs, folder / "frontier.png"))
    return pictures


def draw_figure1(balance: list[Probes], method: list[Probes], path: Path) -> Path:
    """Draw the untrained model, the balance loss alone, and P0's method: means and spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    groups = {
        "untrained": [probes[0] for probes in balance],
        "balance": [probes[-1] for probes in balance],
        "balance\n+ L_o + L_v": [probes[-1] for probes in method],
    }
    for axes, (metric, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        values = [[row[metric] for row in rows] for rows in groups.values()]
        spread = [np.std(column, ddof=1) if len(column) > 1 else 0 for column in values]
        axes.bar(list(groups), [np.mean(column) for column in values], yerr=spread, capsize=3)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
    return _save(figure, path)


def draw_frontier(runs: Mapping[str, list[Probes]], path: Path) -> Path:
    """Draw a point for each arm: mean overlap against mean MaxVio at the end of training."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    figure = Figure(figsize=(7.6, 5.2), layout="constrained")
    axes = figure.subplots()
    families = sorted({arm.split("_")[0] for arm in runs})
    for arm, probes in runs.items():
        point = _end(probes)
        color = f"C{families.index(arm.split('_')[0]) % 10}"
        axes.plot(*point, "o", color=color, markersize=5)
    axes.margins(0.15)
    axes.set(xlabel="MaxVio (0: even load)", ylabel="expert overlap")
    axes.set_title("means over seeds; the number of seeds in brackets", fontsize=9)
    figure.draw_without_rendering()  # label positions are in pixels
    pixels = axes.transData.transform([_end(probes) for probes in runs.values()])
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in pixels]
    for arm, probes in sorted(runs.items(), key=lambda item: _end(item[1])):
        for x, y, side in PLACES:
            label = axes.annotate(
                f"{arm} ({len(probes)})", _end(probes), fontsize=7, ha=side,
                xytext=(x, y), textcoords="offset points",
                color=f"C{families.index(arm.split('_')[0]) % 10}",
            )  # fmt: skip
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            if (x, y, side) != PLACES[-1]:
                label.remove()
        taken.append(box)
    return _save(figure, path)


def _end(probes: list[Probes]) -> tuple[float, float]:
    """MaxVio and overlap of the last probe, means over seeds."""
    violation, overlap = (
        float(np.mean([row[-1][metric] for row in probes]))
        for metric in ("max_violation", "expert_overlap")
    )
    return violation, overlap


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
