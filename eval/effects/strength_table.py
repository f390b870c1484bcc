"""Table and Pareto plots of the strength study.

Differences are paired by seed: each run is compared with the baseline of its seed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.effects.shards import Shard
from eval.effects.strength import BASELINE, StrengthStudy, shard_of
from moe_finetune.io import write_atomic
from moe_finetune.io.tables import markdown as pipe_table
from moe_finetune.metrics.statistics import t_interval

Results = Mapping[Shard, Mapping[str, Any]]
LOSS = "validation_loss"
ALSO = ("expert_overlap", "score_variance", "max_violation")


@dataclass(frozen=True)
class Point:
    """A method at one share: means over seeds, relative to the baseline of the same seed.

    Attributes:
        method, share: the point's method and share.
        seeds: number of seeds.
        metric: the method's target metric.
        baseline, value: the metric's mean in the baseline's runs and in these.
        moved: mean change of the metric; cost: mean change of the held-out loss.
        cost_high: upper end of the cost's 95 % interval over seeds (Student's t); None for one
            seed.
        weights: weight of each term, mean over seeds.
        also: mean changes of other metrics.
    """

    method: str
    share: float
    seeds: int
    metric: str
    baseline: float
    value: float
    moved: float
    cost: float
    cost_high: float | None
    weights: dict[str, float]
    also: dict[str, float]


def points_of(study: StrengthStudy, results: Results) -> list[Point]:
    """Every method and share that has a run together with the baseline of its seed."""
    points = []
    for name, section in study.methods.items():
        for share in study.shares:
            pairs = [
                (results[one], results[two])
                for seed in study.seeds
                if (one := Shard("finetune", BASELINE, seed)) in results
                and (two := shard_of(name, share, seed)) in results
            ]
            if not pairs:
                continue
            baseline_values = [_last(a, section.metric) for a, _ in pairs]
            values = [_last(b, section.metric) for _, b in pairs]
            costs = _changes(pairs, LOSS)
            also = [m for m in ALSO if m != section.metric]
            points.append(
                Point(
                    method=name,
                    share=share,
                    seeds=len(pairs),
                    metric=section.metric,
                    baseline=_mean(baseline_values),
                    value=_mean(values),
                    moved=_mean(_changes(pairs, section.metric)),
                    cost=_mean(costs),
                    cost_high=_high(costs),
                    weights={t: _mean([_weight(b, t) for _, b in pairs]) for t in section.terms},
                    also={metric: _mean(_changes(pairs, metric)) for metric in also},
                )
            )
    return points


def _last(result: Mapping[str, Any], name: str) -> float:
    return float(result["probes"][-1][name])


def _weight(result: Mapping[str, Any], term: str) -> float:
    key = f"strength/{term}/weight"
    return next((float(row[key]) for row in result["log"] if key in row), math.nan)


def _changes(pairs: list[tuple[Any, Any]], name: str) -> list[float]:
    return [_last(b, name) / _last(a, name) - 1 for a, b in pairs]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _high(values: list[float]) -> float | None:
    return None if len(values) < 2 else t_interval(values).high


def strongest(study: StrengthStudy, points: list[Point], method: str) -> Point | None:
    """The largest share whose mean cost is at most the study's; None if there is none."""
    affordable = [p for p in points if p.method == method and p.cost <= study.cost]
    return max(affordable, key=lambda point: point.share, default=None)


def write_strength(study: StrengthStudy, results: Results, output: Path) -> str:
    """Write ``strength.md``, ``.json`` and ``.svg``; return the table."""
    points = points_of(study, results)
    text = markdown(study, points)
    plain = {"title": study.title, "cost": study.cost, "points": [asdict(p) for p in points]}
    write_atomic(output / "strength.json", json.dumps(plain, indent=1) + "\n")
    write_atomic(output / "strength.md", text + "\n")
    draw(study, points, output / "strength.svg")
    return text


def markdown(study: StrengthStudy, points: list[Point]) -> str:
    """The table: each method at the strongest share within the cost."""
    head = ("method", "metric", "share", "weights found", "baseline", "value", "moved",
            "cost [95 % to]", "overlap", "score variance", "MaxVio", "seeds")  # fmt: skip
    lines = [head]
    for name, section in study.methods.items():
        best = strongest(study, points, name)
        if best is None:
            lines.append((name, section.metric, "none", *[""] * 9))
            continue
        weights = " · ".join(f"{term} {weight:.3g}" for term, weight in best.weights.items())
        also = [_percent(best.also.get(m, best.moved)) for m in ALSO]
        high = "" if best.cost_high is None else f" [{_percent(best.cost_high)}]"
        lines.append((name, section.metric, f"{best.share:g}", weights, f"{best.baseline:.4g}",
                 f"{best.value:.4g}", _percent(best.moved), _percent(best.cost) + high, *also,
                 str(best.seeds)))  # fmt: skip
    return pipe_table(lines).rstrip("\n")


def _percent(share: float) -> str:
    return f"{100 * share:+.{0 if abs(share) >= 0.1 else 1}f} %"


COLUMNS = 3
FAR = 8
"""Multiple of the study's cost beyond which points are drawn at the edge."""


def draw(study: StrengthStudy, points: list[Point], path: Path) -> None:
    """Draw a panel for each method: each share's cost against the change of the target metric."""
    from matplotlib.figure import Figure

    names = [name for name in study.methods if any(p.method == name for p in points)]
    rows = math.ceil(len(names) / COLUMNS) or 1
    figure = Figure(figsize=(4 * COLUMNS, 3 * rows), layout="constrained")
    figure.suptitle(study.title)
    grid = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for axes, name in zip(grid, names, strict=False):
        method_points = [p for p in points if p.method == name]
        best, limit = strongest(study, points, name), 100 * FAR * study.cost
        costs, moved = (
            [min(100 * p.cost, limit) for p in method_points],
            [100 * p.moved for p in method_points],
        )
        axes.plot(costs, moved, "o-", color="C0", markerfacecolor="white", linewidth=1)
        for point, x, y in zip(method_points, costs, moved, strict=True):
            beyond = " →" if 100 * point.cost > limit else ""
            axes.annotate(f"{point.share:g}{beyond}", (x, y), xytext=(5, 4), fontsize=8,
                          textcoords="offset points")  # fmt: skip
            if point is best:
                axes.plot(x, y, "o", color="C0")
        axes.axvline(100 * study.cost, color="gray", linestyle="--", linewidth=1)
        metric = study.methods[name].metric.replace("_", " ")
        axes.set(title=name, xlabel="held-out loss, change in %", ylabel=f"{metric}, change in %")
    for axes in list(figure.axes)[len(names) :]:
        axes.set_axis_off()
    figure.savefig(path)
