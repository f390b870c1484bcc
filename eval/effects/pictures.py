"""Pictures of the change in routing: P0's Figure 1, and overlap against balance."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.io.run_folder import RunFolder

PANELS = (
    ("score_variance", "score variance (eq. 7)"),
    ("max_violation", "MaxVio"),
    ("expert_overlap", "expert overlap (eq. 41)"),
)


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure without a screen, and its axes in one list."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def save(figure: Any, path: Path) -> None:
    """Write the picture; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_figure1(balance: Sequence[Any], method: Sequence[Any], path: Path) -> None:
    """Draw the untrained model, the balance loss alone, and P0's method: means and spread."""
    figure, grid = new_figure((9, 3), 1, len(PANELS))
    for axes, (metric, title) in zip(grid, PANELS, strict=True):
        groups = {
            "untrained": [_before(run, metric) for run in balance],
            "balance": [run.value(metric) for run in balance],
            "balance\n+ L_o + L_v": [run.value(metric) for run in method],
        }
        spread = [np.std(values, ddof=1) if len(values) > 1 else 0 for values in groups.values()]
        means = [float(np.mean(values)) for values in groups.values()]
        axes.bar(list(groups), means, yerr=spread, capsize=3)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
    save(figure, path)


def _before(run: Any, metric: str) -> float:
    return json.loads(RunFolder(run.folder).routing_before.read_text())["metrics"][metric]["mean"]


def draw_frontier(results: Mapping[str, Mapping[int, Any]], path: Path) -> None:
    """Draw a point for each arm: mean overlap against mean MaxVio at the end of training."""
    figure, (axes,) = new_figure((7.6, 5.2))
    families = sorted({arm.split("_")[0] for arm in results})
    for arm, runs in results.items():
        point = [
            float(np.mean([run.value(metric) for run in runs.values()]))
            for metric in ("max_violation", "expert_overlap")
        ]
        color = f"C{families.index(arm.split('_')[0]) % 10}"
        axes.plot(*point, "o", color=color, markersize=5)
        axes.annotate(f"{arm} ({len(runs)})", point, xytext=(4, 3), textcoords="offset points",
                      fontsize=7, color=color)  # fmt: skip
    axes.margins(0.15)
    axes.set(xlabel="MaxVio (0: even load)", ylabel="expert overlap")
    axes.set_title("means over seeds; the number of seeds in brackets", fontsize=9)
    save(figure, path)
