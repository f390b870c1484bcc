"""The numbers of a report, for ``--format json`` and for the page."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_finetune.report.compare import difference
from moe_finetune.report.runs import Curve, Run, read_runs

SCORE = ("metric", "value", "stderr", "n", "chance")


def report_numbers(runs: Iterable[Path | str], labels: list[str] | None = None) -> dict[str, Any]:
    """Return the page's content as plain data: numbers, strings, lists; None if missing.

    Args:
        runs: run folders, or folders that contain them; the first run is the baseline.
        labels: a name for each run; the folder's name by default.

    Raises:
        DataError, TraceError: a folder has no results, or a file is damaged; names file and line.
    """
    return numbers_of(read_runs(runs, labels))


def numbers_of(runs: list[Run]) -> dict[str, Any]:
    """:func:`report_numbers` for runs that are already read."""
    baseline, *others = runs
    comparisons = [_comparison(baseline, run) for run in others]
    return _finite({"runs": [_run(run) for run in runs], "comparisons": comparisons})


def _finite(value: Any) -> Any:
    """``value`` with None for numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(run: Run) -> dict[str, Any]:
    scores, base_scores = (
        {
            name: {key: getattr(score, key) for key in SCORE} | {"interval": score.interval()}
            for name, score in by_task.items()
        }
        for by_task in (run.scores, run.base_scores)
    )
    snapshots = {"before": run.routing_before, "after": run.routing_after}
    return {
        "label": run.label,
        "path": str(run.path),
        "model": run.model,
        "method": run.method,
        "last_step": run.last_step,
        "scores": scores,
        "scores_before": base_scores,
        "curves": {name: _curve(curve) for name, curve in run.curves.items()},
        "routing": {
            when: {
                "layers": routing.layers,
                "num_experts": routing.num_experts,
                "tokens": routing.data.get("tokens"),
                "metrics": {name: asdict(metric) for name, metric in routing.metrics().items()},
            }
            for when, routing in snapshots.items()
            if routing is not None
        },
        "summary": run.summary,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    start, end = ends(curve)
    known = [v for v in curve.values if math.isfinite(v)]
    return {
        "points": len(curve.values),
        "start": start,
        "end": end,
        "least": min(known, default=math.nan),
        "greatest": max(known, default=math.nan),
        "not_finite": len(curve.values) - len(known),
    }


def ends(curve: Curve) -> tuple[float, float]:
    """Return a curve's start and end: means of its first and last twentieth, NaN if empty."""
    known = [v for v in curve.values if math.isfinite(v)]
    if not known:
        return math.nan, math.nan
    count = max(1, len(known) // 20)
    return sum(known[:count]) / count, sum(known[-count:]) / count


def _comparison(baseline: Run, run: Run) -> dict[str, Any]:
    scores = {}
    for name in [name for name in run.scores if name in baseline.scores]:
        delta = difference(baseline.scores[name], run.scores[name])
        scores[name] = {
            "difference": delta.value,
            "interval": (delta.low, delta.high),
            "verdict": delta.verdict,
            "paired": delta.paired,
        }
    routing = {}
    if baseline.routing_after is not None and run.routing_after is not None:
        metrics, others = run.routing_after.metrics(), baseline.routing_after.metrics()
        shared = [name for name in metrics if name in others]
        routing = {name: metrics[name].mean - others[name].mean for name in shared}
    return {"run": run.label, "baseline": baseline.label, "scores": scores, "routing": routing}
