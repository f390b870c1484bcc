"""Compare finished evaluations with the first, task by task.

Results with different items or prompts are refused, because they would explain the difference. Each
task is tested by :func:`compare_scores`, and p values are corrected over the tasks (Holm).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.results import Results, load_results
from moe_finetune.evaluation.score import Score, compare_scores
from moe_finetune.evaluation.statistics import PairedTest, correct_and_decide, relative_gain
from moe_finetune.io.hashes import to_json
from moe_finetune.io.tables import aligned

VERDICTS = ("better", "unclear", "worse")


@dataclass
class Row:
    """One task of one method against the baseline.

    Attributes:
        task: the suite's label; ``metric`` its headline metric.
        higher_is_better: the metric's direction.
        n: items joined.
        test: the difference, its interval, p values and verdict.
    """

    task: str
    metric: str
    higher_is_better: bool
    method: str
    n: int
    baseline: float
    value: float
    test: PairedTest


@dataclass
class Comparison:
    """All rows, the number of each verdict and the relative gain of each method."""

    baseline: str
    methods: list[str]
    rows: list[Row] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    gains: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return to_json(asdict(self), 1, sort=False) + "\n"

    def to_text(self) -> str:
        header, *lines = self.table()
        words = {"unclear": "no clear difference", "unknown": "no interval"}
        lines = [[*line[:-1], words.get(line[-1], line[-1])] for line in lines]
        return "\n".join([aligned([header, *lines], "left"), "", *self.summary()]) + "\n"

    def table(self) -> list[list[str]]:
        """Return the rows as cells, headings first."""
        table = [["task", "metric", "n", "method", self.baseline, "value", "difference",
                  "95 % interval", "test", "p", "p (Holm)", "verdict"]]  # fmt: skip
        for row in self.rows:
            test = row.test
            interval = "" if test.low is None else f"[{test.low:+.4f}, {test.high:+.4f}]"
            metric = row.metric if row.higher_is_better else f"{row.metric} ↓"
            table.append(
                [row.task, metric, str(row.n), row.method, f"{row.baseline:.4f}",
                 f"{row.value:.4f}", f"{test.difference:+.4f}", interval, test.name, _p(test.p),
                 _p(test.p_holm), test.verdict]
            )  # fmt: skip
        return table

    def summary(self) -> list[str]:
        """Return a sentence for each method, and the notes."""
        lines = []
        for method in self.methods:
            counts, gain = self.counts[method], self.gains[method]
            text = "not defined (a score of 0)" if gain is None else f"{gain:+.2%}"
            lines.append(
                f"{method}: {counts['better']} better, {counts['unclear']} without a clear "
                f"difference, {counts['worse']} worse; relative gain {text}"
            )
        return lines + self.notes


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def compare(
    results: Sequence[str | Path],
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare evaluations with the first one.

    Args:
        results: a results folder (or results.json) for each method, the baseline first.
        names: names of the methods; their folders' unless given.

    Raises:
        EvaluationError: fewer than two, damaged, no common task, or other items or prompts.
    """
    if len(results) < 2:
        raise EvaluationError("compare needs at least two results; the first is the baseline")
    labels = list(names) if names else result_names(results)
    if len(labels) != len(results):
        raise EvaluationError(f"{len(labels)} names for {len(results)} results")
    loaded = [(_folder(path), load_results(path)) for path in results]
    comparison = Comparison(labels[0], labels[1:])
    for path, run in loaded:
        if not run.get("complete", True):
            left = ", ".join(run.get("unfinished", []))
            comparison.notes.append(f"{path} is incomplete: {left} not finished")
    comparison.notes += _other_backends(labels, [run for _, run in loaded])
    baseline = _scores(*loaded[0])
    for label, (folder, run) in zip(labels[1:], loaded[1:], strict=True):
        rows = _rows(baseline, _scores(folder, run), label, np.random.default_rng(seed))
        if not rows:
            raise EvaluationError(f"{labels[0]} and {label} have no task in common")
        correct_and_decide([(row.test, row.higher_is_better) for row in rows])
        comparison.rows += rows
        verdicts = Counter(row.test.verdict for row in rows)
        verdicts["unclear"] += verdicts.pop("unknown", 0)
        comparison.counts[label] = {verdict: verdicts[verdict] for verdict in VERDICTS}
        comparison.gains[label] = relative_gain(
            (row.value, row.baseline, row.higher_is_better) for row in rows
        )
    return comparison


def _other_backends(labels: Sequence[str], results: Sequence[Results]) -> list[str]:
    """A note if backends or number formats differ, which alone can change some answers."""
    ran = []
    for result in results:
        settings = result.get("settings", {})
        engine = settings.get("engine")
        dtype = engine.get("dtype") if isinstance(engine, dict) else settings.get("dtype")
        ran.append(" in ".join(str(part) for part in (result.get("backend"), dtype) if part))
    if len(set(ran)) < 2:
        return []
    each = ", ".join(f"{label} by {how}" for label, how in zip(labels, ran, strict=True))
    return [f"note: evaluated {each}; part of a difference may come from that"]


def _scores(folder: Path, run: Results) -> dict[str, Score]:
    return {
        name: Score.parse(task, folder)
        for name, task in run["tasks"].items()
        if task["value"] is not None
    }


def _folder(path: str | Path) -> Path:
    path = Path(path)
    return path if path.is_dir() else path.parent


def result_names(results: Iterable[str | Path]) -> list[str]:
    """Return a short, unique name for each folder of results."""
    names = []
    for path in results:
        folder = _folder(path).resolve()
        suffix = {"eval": "", "eval_base": " before"}.get(folder.name)
        names.append(folder.name if suffix is None else f"{folder.parent.name}{suffix}")
    twice = {n for n in names if names.count(n) > 1}
    return [f"{n} ({i})" if n in twice else n for i, n in enumerate(names, 1)]


def _rows(
    baseline: dict[str, Score], method: dict[str, Score], label: str, rng: np.random.Generator
) -> list[Row]:
    rows = []
    for name, score in method.items():
        if name in baseline:
            base = baseline[name]
            check_joined(name, [base, score])
            rows.append(
                Row(name, base.metric, base.higher_is_better, label, base.n or 0, base.value,
                    score.value, compare_scores([base], [score], rng))
            )  # fmt: skip
    return rows


def check_joined(name: str, scores: Sequence[Score]) -> None:
    """Raise EvaluationError unless all scores are of the same metric, items and prompts."""
    metrics = sorted({_directed(score) for score in scores})
    if len(metrics) > 1:
        raise EvaluationError(
            f"task {name}: the results are of different metrics ({' and '.join(metrics)}); "
            "evaluate both with the same suite and version"
        )
    first = scores[0].items
    for score in scores[1:]:
        other = score.items
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


def _directed(score: Score) -> str:
    return f"{score.metric}, {'higher' if score.higher_is_better else 'lower'} is better"
