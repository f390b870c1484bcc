"""Table and Pareto pictures of the strength study.

Differences are paired by seed: each run against the baseline's of the same seed.
"""

from __future__ import annotations

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
from moe_finetune.report.charts.frame import Scale
from moe_finetune.report.markup import Markup, tag

Results = Mapping[Shard, Mapping[str, Any]]
LOSS = "validation_loss"
ALSO = ("expert_overlap", "score_variance", "max_violation")


@dataclass(frozen=True)
class Point:
    """A method at one share: means over seeds, as shares of the baseline's of the same seed.

    Attributes:
        method, share: which.
        seeds: how many.
        metric: the method's own.
        baseline, value: the metric's mean in the baseline's runs and in these.
        moved: mean of the metric's change; cost: mean of the held-out loss's.
        cost_high: upper end of the cost's 95 % interval over seeds (Student's t); None for one.
        weights: found for each term, mean over seeds.
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
    """Every method and share of which a run and the baseline's of its seed are there."""
    found = []
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
            before = [_last(a, section.metric) for a, _ in pairs]
            after = [_last(b, section.metric) for _, b in pairs]
            costs = _changes(pairs, LOSS)
            also = [m for m in ALSO if m != section.metric]
            found.append(
                Point(
                    method=name,
                    share=share,
                    seeds=len(pairs),
                    metric=section.metric,
                    baseline=_mean(before),
                    value=_mean(after),
                    moved=_mean(_changes(pairs, section.metric)),
                    cost=_mean(costs),
                    cost_high=_high(costs),
                    weights={t: _mean([_weight(b, t) for _, b in pairs]) for t in section.terms},
                    also={metric: _mean(_changes(pairs, metric)) for metric in also},
                )
            )
    return found


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
    """The largest share whose mean cost is at most the study's; None where none is."""
    affordable = [p for p in points if p.method == method and p.cost <= study.cost]
    return max(affordable, key=lambda point: point.share, default=None)


def write_strength(study: StrengthStudy, results: Results, output: Path) -> str:
    """Write ``strength.md``, ``.json`` and ``.svg``; return the table."""
    points = points_of(study, results)
    text = markdown(study, points)
    plain = {"title": study.title, "cost": study.cost, "points": [asdict(p) for p in points]}
    write_atomic(output / "strength.json", json.dumps(plain, indent=1) + "\n")
    write_atomic(output / "strength.md", text + "\n")
    write_atomic(output / "strength.svg", picture(study, points) + "\n")
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


# -- the picture: one panel a method, cost to the right, the metric's change upwards -------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 330, 240, 56, 34, 16, 44
COLUMNS = 3
INK, LINE, MARK, BEST = "#1a212b", "#d5dae1", "#5a6573", "#0b5f96"


def picture(study: StrengthStudy, points: list[Point]) -> str:
    """An SVG of its own: what each share costs, and how far it moves the method's metric."""
    names = [name for name in study.methods if any(p.method == name for p in points)]
    rows = math.ceil(len(names) / COLUMNS) or 1
    parts = []
    for place, name in enumerate(names):
        mine = [p for p in points if p.method == name]
        panel = _panel(study, name, mine, strongest(study, points, name))
        x, y = WIDTH * (place % COLUMNS), HEIGHT * (place // COLUMNS)
        parts.append(tag("g", panel, transform=f"translate({x},{y})"))
    width, height = WIDTH * min(COLUMNS, max(1, len(names))), HEIGHT * rows
    return tag(
        "svg",
        tag("title", study.title),
        tag("rect", width=str(width), height=str(height), fill="#ffffff"),
        parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        font_family="system-ui, sans-serif",
        font_size="11",
        fill=INK,
    )


def _panel(study: StrengthStudy, name: str, mine: list[Point], best: Point | None) -> Markup:
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    # Far beyond the cost that the table allows, only that it is far matters.
    far = 8 * study.cost
    x = Scale.around([0.0, 100 * study.cost, *(100 * min(p.cost, far) for p in mine)], count=4)
    y = Scale.around([0.0, *(100 * p.moved for p in mine)], count=4)

    def at(point: Point) -> tuple[float, float]:
        return (
            LEFT + inner_w * x(100 * min(point.cost, far)),
            TOP + inner_h * (1 - y(100 * point.moved)),
        )

    marks: list[Markup] = [
        tag("text", name, x=str(LEFT), y="18", font_weight="600", font_size="12.5")
    ]
    for tick in x.ticks:
        px = f"{LEFT + inner_w * x(tick):.1f}"
        marks.append(tag("line", x1=px, x2=px, y1=str(TOP), y2=str(TOP + inner_h), stroke=LINE))
        marks.append(
            tag("text", f"{tick:g}", x=px, y=str(TOP + inner_h + 14), text_anchor="middle",
                fill=MARK)
        )  # fmt: skip
    for tick in y.ticks:
        py = f"{TOP + inner_h * (1 - y(tick)):.1f}"
        marks.append(tag("line", x1=str(LEFT), x2=str(LEFT + inner_w), y1=py, y2=py, stroke=LINE))
        marks.append(
            tag("text", f"{tick:g}", x=str(LEFT - 6), y=py, dy="4", text_anchor="end", fill=MARK)
        )
    limit = f"{LEFT + inner_w * x(100 * study.cost):.1f}"
    marks.append(
        tag("line", x1=limit, x2=limit, y1=str(TOP), y2=str(TOP + inner_h), stroke=MARK,
            stroke_dasharray="4 3")
    )  # fmt: skip
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(at, mine))
    marks.append(tag("polyline", points=path, fill="none", stroke=BEST, stroke_opacity="0.45"))
    for point in mine:
        a, b = at(point)
        marks.append(
            tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r="5" if point is best else "3.4",
                fill=BEST if point is best else "#ffffff", stroke=BEST, stroke_width="1.6")
        )  # fmt: skip
        beyond = " →" if point.cost > far else ""
        marks.append(tag("text", f"{point.share:g}{beyond}", x=f"{a + 7:.1f}", y=f"{b - 5:.1f}"))
    metric = mine[0].metric.replace("_", " ")
    marks.append(
        tag("text", "held-out loss, change in %", x=str(LEFT + inner_w / 2),
            y=str(HEIGHT - 12), text_anchor="middle", fill=MARK)
    )  # fmt: skip
    turned = f"translate(13,{TOP + inner_h / 2:.0f}) rotate(-90)"
    marks.append(
        tag("text", f"{metric}, change in %", transform=turned, text_anchor="middle", fill=MARK)
    )
    return tag("g", marks)
