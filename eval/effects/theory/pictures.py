"""Figures 2 and 3 of P4 as PNG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from eval.effects.shards import Shard

TITLES = {"baseline": "Baseline", "orthogonality": "L_o", "dpp": "DPP", "ncl": "NCL"}


def draw_pictures(results: Mapping[Shard, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw what the results have: ``figure2.png``, ``figure3.png``; return the files."""
    sweeps = [result for shard, result in results.items() if shard.part == "recovery"]
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for shard, result in results.items():
        if shard.part == "classification":
            arms.setdefault(shard.arm, []).append(result)
    drawn = []
    if sweeps:
        drawn.append(draw_recovery(sweeps, folder / "figure2.png"))
    if arms:
        drawn.append(draw_classification(arms, folder / "figure3.png"))
    return drawn


def draw_recovery(sweeps: list[Mapping[str, Any]], path: Path) -> Path:
    """Recovery against coherence, greedy and optimal, with the barrier."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    coherences = [row["coherence"] for row in sweeps[0]["random"]]
    for choice, style in (("optimal", "s--"), ("greedy", "o-")):
        mean = np.mean([[row[choice] for row in sweep["random"]] for sweep in sweeps], axis=0)
        axes.plot(coherences, mean, style, label=f"{choice}, random features", markersize=4)
    worst = sweeps[0]["worst_case"]
    axes.plot(
        [row["coherence"] for row in worst],
        [row["greedy"] for row in worst],
        "x:",
        label="greedy, worst features",
    )
    axes.axvline(sweeps[0]["barrier"], color="gray", linewidth=1, label="barrier 1/(2k-1)")
    axes.set(xlabel="mutual coherence", ylabel="share of subsets recovered", ylim=(-0.05, 1.05))
    axes.legend(fontsize=8)
    return _save(figure, path)


def draw_classification(arms: Mapping[str, list[Mapping[str, Any]]], path: Path) -> Path:
    """Effective rank and accuracy by arm, and the heat maps of the first seed's first fold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * (len(arms) + 1), 5.6), layout="constrained")
    grid = figure.subplots(2, len(arms) + 1, squeeze=False)
    names = [TITLES.get(arm, arm) for arm in arms]
    for axes, metric in zip(grid[:, 0], ("effective_rank", "accuracy"), strict=True):
        means = [[float(np.mean(result[metric])) for result in runs] for runs in arms.values()]
        axes.boxplot(means, tick_labels=names)
        axes.set_title(metric.replace("_", " "), fontsize=9)
        axes.tick_params(labelsize=7)
    # One scale for all arms, or the colours could not be compared.
    largest = {
        key: max(np.max(runs[0][key]) for runs in arms.values())
        for key in ("cosines", "class_shares")
    }
    for column, runs in enumerate(arms.values(), start=1):
        for axes, key, title in (
            (grid[0, column], "cosines", "|cos| of two experts"),
            (grid[1, column], "class_shares", "expert x class"),
        ):
            values = np.array(runs[0][key])
            drawn = axes.imshow(values, vmin=0, vmax=largest[key], aspect="auto", cmap="viridis")
            axes.set_title(f"{names[column - 1]}: {title}", fontsize=8)
            axes.tick_params(labelsize=6)
            figure.colorbar(drawn, ax=axes, shrink=0.7).ax.tick_params(labelsize=6)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
