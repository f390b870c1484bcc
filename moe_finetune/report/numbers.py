"""The numbers of a report, for ``--format json`` and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_finetune.evaluation.score import Score
from moe_finetune.io.terminal import finite
from moe_finetune.report.compare import difference
from moe_finetune.report.routing import Routing
from moe_finetune.report.runs import Curve, Run, read_runs


def report_numbers(runs: Iterable[Path | str], labels: list[str] | None = None) -> dict[str, Any]:
    """Return what the page says as plain data: numbers, strings, lists, None for what is missing.

    Args:
        runs: run folders, or folders that hold them; the first run is the baseline.
        labels: a name for each run; the folder's name by default.

    Raises:
        DataError, TraceError: a folder without results or a damaged file, by name and line.
    """
    read = read_runs(runs, labels)
    return finite(
        {
            "runs": [_run(run) for run in read],
            "comparisons": [_comparison(read[0], run) for run in read[1:]],
        }
    )


def _run(run: Run) -> dict[str, Any]:
    return {
        "label": run.label,
        "path": str(run.path),
        "model": run.model,
        "method": run.method,
        "last_step": run.last_step,
        "scores": {name: _score(score) for name, score in run.scores.items()},
        "scores_before": {name: _score(score) for name, score in run.base_scores.items()},
        "curves": {name: _curve(curve) for name, curve in run.curves.items()},
        "routing": {
            when: _routing(routing)
            for when, routing in (("before", run.before), ("after", run.after))
            if routing is not None
        },
        "summary": run.summary,
    }


def _score(score: Score) -> dict[str, Any]:
    return {
        "metric": score.metric,
        "value": score.value,
        "stderr": score.stderr,
        "n": score.n,
        "chance": score.chance,
        "interval": score.interval(),
    }


def _curve(curve: Curve) -> dict[str, Any]:
    first, last = ends(curve)
    finite = [v for v in curve.values if math.isfinite(v)]
    return {
        "points": len(curve.values),
        "start": first,
        "end": last,
        "least": min(finite, default=math.nan),
        "greatest": max(finite, default=math.nan),
        "not_finite": len(curve.values) - len(finite),
    }


def ends(curve: Curve) -> tuple[float, float]:
    """Return where a curve starts and ends: means of its first and last twentieth, NaN if empty."""
    finite = [v for v in curve.values if math.isfinite(v)]
    if not finite:
        return math.nan, math.nan
    count = max(1, len(finite) // 20)
    return sum(finite[:count]) / count, sum(finite[-count:]) / count


def _routing(routing: Routing) -> dict[str, Any]:
    return {
        "layers": routing.layers,
        "num_experts": routing.num_experts,
        "tokens": routing.data.get("tokens"),
        "metrics": {
            name: {"mean": metric.mean, "per_layer": metric.per_layer}
            for name, metric in routing.metrics().items()
        },
    }


def _comparison(baseline: Run, run: Run) -> dict[str, Any]:
    scores = {}
    for name, score in run.scores.items():
        if name in baseline.scores:
            delta = difference(baseline.scores[name], score)
            scores[name] = {
                "difference": delta.value,
                "interval": (delta.low, delta.high),
                "verdict": delta.verdict,
                "paired": delta.paired,
            }
    routing = {}
    if baseline.after is not None and run.after is not None:
        ours, theirs = run.after.metrics(), baseline.after.metrics()
        routing = {name: ours[name].mean - theirs[name].mean for name in ours if name in theirs}
    return {"run": run.label, "baseline": baseline.label, "scores": scores, "routing": routing}
