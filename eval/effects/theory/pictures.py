"""Figures 2 and 3 of P4 as PNG files, and Figure 3's curves as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.io import write_atomic
from moe_finetune.io.tables import csv_text

if TYPE_CHECKING:
    from eval.effects.shards import Shard

TITLES = {"baseline": "Baseline", "orthogonality": "L_o", "dpp": "DPP", "ncl": "NCL"}


def draw_pictures(results: Mapping[Shard, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the figures that have results; return the files.

    ``figure2.png``; ``figure3.png`` (the end of training) and ``figure3_epochs.png`` with its
    numbers, ``figure3_epochs.csv``.
    """
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
        curves = epoch_rows(arms)
        drawn.append(draw_epochs(curves, folder / "figure3_epochs.png"))
        write_atomic(folder / "figure3_epochs.csv", csv_text(curves))
        drawn.append(folder / "figure3_epochs.csv")
    return drawn


def draw_recovery(sweeps: list[Mapping[str, Any]], path: Path) -> Path:
    """Draw recovery against coherence, greedy and optimal, with the barrier."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    coherences = [row["coherence"] for row in sweeps[0]["random"]]
    for choice, style in (("optimal", "s--"), ("greedy", "o-")):
        mean = np.mean([[row[choice] for row in sweep["random"]] for sweep in sweeps], axis=0)
        axes.plot(coherences, mean, style, label=f"{choice}, random features", markersize=4)
    drawn = [sweep["gaussian"] for sweep in sweeps if "gaussian" in sweep]
    if drawn:
        mean = np.mean([[row["greedy"] for row in rows] for rows in drawn], axis=0)
        axes.plot(coherences, mean, "^-.", label="greedy, Gaussian weights", markersize=4)
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
    """Draw effective rank and accuracy by arm over folds, and heat maps of one fold.

    The fold is the first seed's first. Experts are sorted by the class that selects them most.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * (len(arms) + 1), 5.6), layout="constrained")
    grid = figure.subplots(2, len(arms) + 1, squeeze=False)
    names = [TITLES.get(arm, arm) for arm in arms]
    for axes, metric in zip(grid[:, 0], ("effective_rank", "accuracy"), strict=True):
        folds = [np.concatenate([result[metric] for result in runs]) for runs in arms.values()]
        axes.boxplot(folds, tick_labels=names)
        axes.set_title(f"{metric.replace('_', ' ')}, every fold", fontsize=9)
        axes.tick_params(labelsize=7)
    # One scale for all arms, so that colors can be compared.
    largest = {
        key: max(np.max(runs[0][key]) for runs in arms.values())
        for key in ("cosines", "class_shares")
    }
    for column, runs in enumerate(arms.values(), start=1):
        order_E = np.argsort(np.argmax(runs[0]["class_shares"], axis=1), kind="stable")
        for axes, key, title in (
            (grid[0, column], "cosines", "|cos| of two experts"),
            (grid[1, column], "class_shares", "expert x class"),
        ):
            values = np.array(runs[0][key])[order_E]
            values = values[:, order_E] if key == "cosines" else values
            drawn = axes.imshow(values, vmin=0, vmax=largest[key], aspect="auto", cmap="viridis")
            axes.set_title(f"{names[column - 1]}: {title}", fontsize=8)
            axes.tick_params(labelsize=6)
            figure.colorbar(drawn, ax=axes, shrink=0.7).ax.tick_params(labelsize=6)
    return _save(figure, path)


def epoch_rows(arms: Mapping[str, list[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Mean and spread of folds in every epoch: a row for each arm, metric and epoch.

    ``spread`` is the standard deviation over the folds of a seed, averaged over seeds as variances.
    """
    table = []
    for arm, runs in arms.items():
        for metric in runs[0]["curves"]:
            values_SAM = np.array([run["curves"][metric] for run in runs])
            spread_A = np.sqrt(values_SAM.var(axis=2, ddof=1).mean(0))
            for epoch, (mean, spread) in enumerate(
                zip(values_SAM.mean((0, 2)), spread_A, strict=True)
            ):
                table.append(
                    {
                        "arm": arm,
                        "metric": metric,
                        "epoch": epoch,
                        "mean": round(float(mean), 5),
                        "spread": round(float(spread), 5),
                        "folds": values_SAM.shape[2],
                        "seeds": len(runs),
                    }
                )
    return table


def draw_epochs(rows: list[dict[str, Any]], path: Path) -> Path:
    """Draw accuracy and effective rank over epochs, with one standard deviation of folds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("accuracy", "effective_rank"), strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            selected = [row for row in rows if (row["arm"], row["metric"]) == (arm, metric)]
            epochs, mean, spread = (
                np.array([row[key] for row in selected]) for key in ("epoch", "mean", "spread")
            )
            (line,) = axes.plot(epochs, mean, label=TITLES.get(arm, arm), linewidth=1.4)
            axes.fill_between(
                epochs, mean - spread, mean + spread, color=line.get_color(), alpha=0.15
            )
        axes.set(xlabel="epoch", title=metric.replace("_", " "))
        axes.legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
