"""The columns of a study's table: benchmarks, their average, and metrics."""

from dataclasses import dataclass, replace

from moe_finetune.errors import StudyError, did_you_mean
from moe_finetune.study.read_study import AVERAGE, RunResult, StudyResults


@dataclass(frozen=True)
class Column:
    """A benchmark (``metric`` is its headline metric) or a metric; ``better`` is its direction.

    ``items``: how many a benchmark has, if known.
    """

    name: str
    metric: str
    better: str
    benchmark: bool
    percent: bool = False
    items: int | None = None

    @property
    def higher_is_better(self) -> bool:
        return self.better == "higher"


def columns_of(results: StudyResults) -> list[Column]:
    """The study's benchmarks, their average if requested, and its metrics."""
    by_label: dict[str, Column] = {}
    for run in results.finished:
        for label, score in run.scores.items():
            better = "higher" if score.higher_is_better else "lower"
            by_label.setdefault(label, Column(label, score.metric, better, True, items=score.n))
    labels = results.benchmarks if results.benchmarks is not None else list(by_label)
    for label in labels:
        if label not in by_label:
            raise StudyError(f"benchmarks: no run has '{label}'{did_you_mean(label, by_label)}")
    columns = [_percent(by_label[label], results) for label in labels]
    metrics = dict(results.metrics)
    if not metrics and any(run.has("eval_loss") for run in results.finished):
        metrics = {"eval_loss": "lower"}
    if metrics.pop(AVERAGE, None):
        columns.append(_average(columns))
    for name, better in metrics.items():
        if not any(run.has(name) for run in results.finished):
            near = did_you_mean(name, results.finished[0].curves)
            raise StudyError(f"metrics: no run has '{name}'{near}")
        columns.append(Column(name, name, better, benchmark=False))
    return columns


def _average(benchmarks: list[Column]) -> Column:
    """The column of the mean over all benchmarks."""
    if not benchmarks:
        raise StudyError("metrics: average: no run has a benchmark")
    if len({(column.better, column.percent) for column in benchmarks}) > 1:
        names = ", ".join(column.name for column in benchmarks)
        raise StudyError(
            f"metrics: average: {names} differ in direction or unit; list those to average in "
            "benchmarks"
        )
    first = benchmarks[0]
    return Column(AVERAGE, AVERAGE, first.better, benchmark=False, percent=first.percent)


def _percent(column: Column, results: StudyResults) -> Column:
    values = [v for run in results.finished if (v := value_of(column, run)) is not None]
    shares = bool(values) and all(0 <= value <= 1 for value in values)
    return replace(column, percent=shares)


def value_of(column: Column, run: RunResult) -> float | None:
    """A run's value in a column; None if it has none."""
    if not column.benchmark:
        return run.value(column.name)
    score = run.scores.get(column.name)
    return score.value if score else None
