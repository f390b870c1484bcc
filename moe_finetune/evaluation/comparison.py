"""Compare finished evaluations item by item, with tests that fit paired answers.

Items are joined by (task, hash of the item); the comparison is refused when the items or the
prompts differ, because then the difference is not the models'. Answers that are right or wrong are
tested with McNemar's exact test, others with a paired bootstrap; p values are corrected over the
tasks by Holm's method.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.results import Results, TaskResult, load_results, load_samples
from moe_finetune.io.hashes import to_json
from moe_finetune.io.tables import aligned
from moe_finetune.metrics.statistics import (
    ALPHA,
    compare_items,
    holm,
    mean_and_deviation,
    relative_gain,
)

RunPaths = str | Path | Sequence[str | Path]


@dataclass
class Row:
    """One task of one method against the baseline.

    Attributes:
        task: the suite's label; ``metric`` its headline metric.
        n: items joined.
        baseline, value: mean over seeds; ``baseline_std`` and ``value_std`` the sample standard
            deviation over seeds (None with one seed).
        difference: value - baseline; ``low`` and ``high`` its 95 % paired bootstrap interval.
        test: ``"McNemar"``, ``"bootstrap"`` or ``"none"`` (a metric that no item has by itself).
        p: two-sided p value; ``p_holm`` corrected over this method's tasks.
        verdict: ``"win"``, ``"loss"`` or ``"tie"`` at 5 % after correction.
    """

    task: str
    metric: str
    method: str
    n: int
    baseline: float
    value: float
    baseline_std: float | None
    value_std: float | None
    difference: float
    low: float | None = None
    high: float | None = None
    test: str = "none"
    p: float | None = None
    p_holm: float | None = None
    verdict: str = "tie"


@dataclass
class Comparison:
    """All rows, the win/tie/loss counts and the relative gain of each method."""

    baseline: str
    methods: list[str]
    rows: list[Row]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    gains: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return to_json(asdict(self), 1, sort=False) + "\n"

    def to_text(self) -> str:
        return "\n".join([aligned(self._table(), "left"), "", *self._summary()]) + "\n"

    def to_html(self) -> str:
        header, *lines = self._table()
        head = "".join(f"<th>{html.escape(c)}</th>" for c in header)
        body = "".join(
            "<tr class='{}'>{}</tr>".format(
                line[-1], "".join(f"<td>{html.escape(c)}</td>" for c in line)
            )
            for line in lines
        )
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._summary())
        return (
            "<!doctype html><html lang='en'><meta charset='utf-8'><title>Comparison</title><style>"
            "body{font:15px system-ui;margin:2rem auto;max-width:70rem;padding:0 1rem}"
            "table{border-collapse:collapse}td,th{padding:.3rem .7rem;text-align:left;"
            "border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}"
            ".win td:last-child{color:#06724a;font-weight:600}"
            ".loss td:last-child{color:#b3261e;font-weight:600}</style>"
            f"<h1>Comparison with {html.escape(self.baseline)}</h1>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</html>\n"
        )

    def _table(self) -> list[list[str]]:
        table = [["task", "metric", "n", "method", self.baseline, "value", "difference",
                  "95 % interval", "test", "p", "p (Holm)", "verdict"]]  # fmt: skip
        for row in self.rows:
            interval = "" if row.low is None else f"[{row.low:+.4f}, {row.high:+.4f}]"
            table.append(
                [row.task, row.metric, str(row.n), row.method,
                 _plus_minus(row.baseline, row.baseline_std), _plus_minus(row.value, row.value_std),
                 f"{row.difference:+.4f}", interval, row.test, _p(row.p), _p(row.p_holm),
                 row.verdict]
            )  # fmt: skip
        return table

    def _summary(self) -> list[str]:
        lines = []
        for method in self.methods:
            c, gain = self.counts[method], self.gains[method]
            text = "not defined (a baseline of 0)" if gain is None else f"{gain:+.2%}"
            lines.append(
                f"{method}: {c['win']} wins, {c['tie']} ties, {c['loss']} losses; "
                f"relative gain {text}"
            )
        return lines + self.notes


def _plus_minus(mean: float, std: float | None) -> str:
    return f"{mean:.4f}" if std is None else f"{mean:.4f} ± {std:.4f}"


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def compare(
    results: Sequence[RunPaths],
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare evaluations with the first one.

    Args:
        results: one results folder (or results.json) per method, the baseline first; a list of
            them for a method trained with several seeds.
        names: names of the methods; their folders' unless given.

    Raises:
        EvaluationError: fewer than two, damaged, no common task, or other items or prompts.
    """
    groups = [[g] if isinstance(g, (str, Path)) else list(g) for g in results]
    if len(groups) < 2 or not all(groups):
        raise EvaluationError("compare needs at least two results; the first is the baseline")
    labels = list(names) if names else result_names([group[0] for group in groups])
    if len(labels) != len(groups):
        raise EvaluationError(f"{len(labels)} names for {len(groups)} results")
    loaded = [[(_folder(p), load_results(p)) for p in group] for group in groups]
    comparison = Comparison(labels[0], labels[1:], [])
    for path, run in (item for group in loaded for item in group):
        if not run["complete"]:
            comparison.notes.append(
                f"{path} is incomplete: {', '.join(run['unfinished'])} not finished"
            )
    for label, runs in zip(labels[1:], loaded[1:], strict=True):
        rows = _rows(loaded[0], runs, label, np.random.default_rng(seed))
        if not rows:
            raise EvaluationError(f"{labels[0]} and {label} have no task in common")
        tested = [row for row in rows if row.p is not None]
        for row, p in zip(tested, holm([r.p for r in tested if r.p is not None]), strict=True):
            row.p_holm = p
            if p < ALPHA:
                row.verdict = "win" if row.difference > 0 else "loss"
        comparison.rows += rows
        comparison.counts[label] = {
            v: sum(r.verdict == v for r in rows) for v in ("win", "tie", "loss")
        }
        comparison.gains[label] = relative_gain((r.value, r.baseline) for r in rows)
    return comparison


def _folder(path: str | Path) -> Path:
    path = Path(path)
    return path if path.is_dir() else path.parent


def result_names(results: Iterable[str | Path]) -> list[str]:
    """Return a short name for each folder of results, no two alike."""
    names = []
    for path in results:
        folder = _folder(path).resolve()
        names.append(folder.parent.name if folder.name == "eval" else folder.name)
    twice = {n for n in names if names.count(n) > 1}
    return [f"{n} ({i})" if n in twice else n for i, n in enumerate(names, 1)]


def _rows(
    baseline: list[tuple[Path, Results]],
    method: list[tuple[Path, Results]],
    label: str,
    rng: np.random.Generator,
) -> list[Row]:
    rows = []
    for name, task in baseline[0][1]["tasks"].items():
        if not all(name in run["tasks"] for _, run in [*baseline, *method]):
            continue
        sides = [[(folder, run["tasks"][name]) for folder, run in side]
                 for side in (baseline, method)]  # fmt: skip
        scores = [[t["value"] for _, t in side] for side in sides]
        if any(v is None for side in scores for v in side):
            continue
        (a, a_std), (b, b_std) = (
            mean_and_deviation([float(v or 0) for v in side]) for side in scores
        )
        row = Row(name, task["metric"], label, task["n"], a, b, a_std, b_std, b - a)
        rows.append(row)
        items = [[item_values(folder, t) for folder, t in side] for side in sides]
        check_joined(name, items)
        keys = list(items[0][0])
        if any(math.isnan(items[0][0][key][1]) for key in keys):
            continue  # a corpus metric such as MCC: no item has a value of its own
        base_1N, value_1N = (
            np.array([[run[key][1] for key in keys] for run in side]).mean(0, keepdims=True)
            for side in items
        )
        found = compare_items(value_1N, base_1N, rng)
        row.low, row.high, row.test, row.p = found.low, found.high, found.name, found.p
    return rows


def item_values(folder: Path, task: TaskResult) -> dict[tuple[str, str, int], tuple[str, float]]:
    """Return (task, item, occurrence) -> (hash of the prompts, value of the headline metric)."""
    found: dict[tuple[str, str, int], tuple[str, float]] = {}
    rows = load_samples(folder, task)
    filters = {row["filter"] for row in rows}
    chosen = task["filter"] if task["filter"] in filters else min(filters)
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["filter"] != chosen:
            continue
        base = (row["task"], row["item"])
        seen[base] = seen.get(base, -1) + 1
        value = row["metrics"].get(task["metric"], math.nan)
        number = float(value) if isinstance(value, (int, float)) else math.nan
        found[(*base, seen[base])] = (row["prompt_sha256"], number)
    return found


def check_joined(name: str, sides: list[list[dict]]) -> None:
    """Raise EvaluationError unless all runs of all sides have the same items and prompts."""
    runs = [run for side in sides for run in side]
    first = runs[0]
    for other in runs[1:]:
        if first.keys() != other.keys():
            common = len(first.keys() & other.keys())
            raise EvaluationError(
                f"task {name}: the results cover other items ({len(first)} and {len(other)}, "
                f"{common} in common); evaluate with the same data and limit"
            )
        differing = sum(first[key][0] != other[key][0] for key in first)
        if differing:
            raise EvaluationError(
                f"task {name}: {differing} of {len(first)} prompts differ; results are comparable "
                "only with the same shots, template and seed"
            )
