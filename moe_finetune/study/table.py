"""The table of a study: mean and spread over seeds, ranks, gains, tests against the baseline.

Rows are arms, grouped by the axes that the baseline does not name (such as the model) and compared
within a group; columns are benchmarks, then their average and the study's metrics.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import rankdata

from moe_finetune.errors import StudyError
from moe_finetune.evaluation.score import Score, check_joined, compare_scores
from moe_finetune.evaluation.statistics import (
    PairedTest,
    compare_seeds,
    decide_together,
    mean_and_deviation,
    relative_gain,
)
from moe_finetune.study.columns import Column, columns_of, value_of
from moe_finetune.study.read_study import AVERAGE, RunResult, StudyResults


@dataclass
class Cell:
    """One arm in one column: values by seed, their mean and sample standard deviation."""

    values: dict[int, float]
    mean: float
    std: float | None
    best: bool = False
    rank: float | None = None
    test: PairedTest | None = None


@dataclass
class Row:
    """One line of a group; ``label`` names what varies within the group."""

    label: str
    cells: dict[str, Cell]
    baseline: bool = False


@dataclass
class Group:
    """Arms that are compared with each other; ``values`` are those of the other axes."""

    name: str
    values: dict[str, str]
    rows: list[Row]


@dataclass
class Table:
    """A study's table.

    Attributes:
        ranks: mean rank of each label over the group x benchmark cells that all arms have; 1 is
            best, ties share a rank.
        gains: mean over a label's group x benchmark cells of value / baseline - 1, or None.
        won: share of the ranked cells in which a label is best; ties split the cell.
        notes: what is missing or not compared.
    """

    name: str
    title: str
    source: str
    seeds: list[int]
    columns: list[Column]
    groups: list[Group]
    baseline: str | None
    ranks: dict[str, float] = field(default_factory=dict)
    gains: dict[str, float | None] = field(default_factory=dict)
    won: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[tuple[Group, Row]]:
        return ((group, row) for group in self.groups for row in group.rows)

    @property
    def tests(self) -> Iterator[tuple[tuple[Group, Row], Column, Cell, PairedTest]]:
        """Every cell with a test, by row and column."""
        for group, row in self.rows:
            for column in self.columns:
                cell = row.cells.get(column.name)
                if cell is not None and cell.test is not None:
                    yield (group, row), column, cell, cell.test

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def make_table(results: StudyResults) -> Table:
    """Compute the table from the finished runs."""
    shared, compared = set(results.together), _compared(results)
    label = "-".join(results.baseline.values()) or None
    groups: dict[str, Group] = {}
    runs_of: dict[tuple[str, str], list[RunResult]] = {}
    for arm, values in results.arms.items():
        group_values = {a: v for a, v in values.items() if a not in compared and a not in shared}
        name, within = group_and_row(results, values)
        if runs := results.of(arm):
            groups.setdefault(name, Group(name, group_values, []))
            runs_of.setdefault((name, within), []).extend(runs)
    columns = columns_of(results)
    for (name, within), runs in runs_of.items():
        labels = [column.name for column in columns if column.benchmark]
        cells = {c.name: cell for c in columns if (cell := _cell(c, runs, labels)) is not None}
        groups[name].rows.append(Row(within, cells, baseline=within == label))
    table = Table(
        name=results.name,
        title=results.title,
        source=results.source,
        seeds=results.seeds,
        columns=columns,
        groups=list(groups.values()),
        baseline=label,
    )
    _rank(table)
    if label is not None:
        _compare(table, runs_of)
    _note_missing(table, results)
    return table


def _compared(results: StudyResults) -> list[str]:
    """Axes whose arms are compared with each other."""
    return list(results.baseline) or [a for a in results.axes if a not in results.together]


def group_and_row(results: StudyResults, values: dict[str, str]) -> tuple[str, str]:
    """Names of the group and of the row that an arm of these values belongs to."""
    compared = _compared(results)
    names = [v for a, v in values.items() if a not in compared and a not in results.together]
    return ", ".join(names), "-".join(values[axis] for axis in compared) or results.name


def _cell(column: Column, runs: list[RunResult], benchmarks: list[str]) -> Cell | None:
    """Mean and spread over seeds; if several runs of a seed have a metric, their mean counts.

    The average is over ``benchmarks``, for the seeds that have a score of each.
    """
    if column.name == AVERAGE:
        return _averages(runs, benchmarks)
    by_run: dict[int, list[float]] = {}
    for run in runs:
        if (value := value_of(column, run)) is not None:
            by_run.setdefault(run.seed, []).append(value)
    if not by_run:
        return None
    if column.benchmark and any(len(values) > 1 for values in by_run.values()):
        raise StudyError(
            f"together: several runs of a row have the benchmark '{column.name}'; let each "
            "evaluate its own with evaluation.only"
        )
    by_seed = {seed: float(np.mean(values)) for seed, values in by_run.items()}
    return Cell(by_seed, *mean_and_deviation([*by_seed.values()]))


def _averages(runs: list[RunResult], benchmarks: list[str]) -> Cell | None:
    scores: dict[int, dict[str, float]] = {}
    for run in runs:
        for name in benchmarks:
            if name in run.scores:
                scores.setdefault(run.seed, {})[name] = run.scores[name].value
    by_seed = {
        seed: float(np.mean([*values.values()]))
        for seed, values in scores.items()
        if len(values) == len(benchmarks)
    }
    return Cell(by_seed, *mean_and_deviation([*by_seed.values()])) if by_seed else None


def _rank(table: Table) -> None:
    """Mark the best cells, and rank arms on benchmarks that a whole group has."""
    ranks: dict[str, list[float]] = {}
    wins: dict[str, list[float]] = {}
    for group in table.groups:
        for column in table.columns:
            rows = [row for row in group.rows if column.name in row.cells]
            if not rows:
                continue
            sign = -1 if column.higher_is_better else 1
            means = np.array([sign * row.cells[column.name].mean for row in rows])
            best = means == means.min()
            for row, rank in zip(rows, rankdata(means), strict=True):
                cell = row.cells[column.name]
                cell.best = bool(sign * cell.mean == means.min()) and len(rows) > 1
                if column.benchmark and len(rows) == len(group.rows):
                    cell.rank = float(rank)
                    ranks.setdefault(row.label, []).append(float(rank))
                    wins.setdefault(row.label, []).append(cell.best / best.sum())
    table.ranks = {label: float(np.mean(values)) for label, values in ranks.items()}
    table.won = {label: float(np.mean(values)) for label, values in wins.items()}


def _compare(table: Table, runs_of: dict[tuple[str, str], list[RunResult]]) -> None:
    gains: dict[str, list[tuple[float, float, bool]]] = {}
    for group in table.groups:
        base = next((row for row in group.rows if row.baseline), None)
        if base is None:
            table.notes.append(f"{group.name or 'the study'}: the baseline has no finished run yet")
            continue
        for row in group.rows:
            for column in table.columns:
                if row is base or not {column.name} <= row.cells.keys() & base.cells.keys():
                    continue
                cell, other = row.cells[column.name], base.cells[column.name]
                both = (runs_of[group.name, row.label], runs_of[group.name, base.label])
                cell.test = _test(column, cell, other, *both)
                if column.benchmark:
                    gains.setdefault(row.label, []).append(
                        (cell.mean, other.mean, column.higher_is_better)
                    )
    for label, cells in gains.items():
        table.gains[label] = relative_gain(cells)
    decide_together([(test, column.higher_is_better) for _, column, _, test in table.tests])


def _test(
    column: Column, cell: Cell, other: Cell, runs: list[RunResult], base: list[RunResult]
) -> PairedTest | None:
    """Test an arm against the baseline over the seeds that both have."""
    seeds = [seed for seed in cell.values if seed in other.values]
    if not seeds:
        return None
    if column.benchmark:
        arm_scores, base_scores = (_scores(column, side, seeds) for side in (runs, base))
        check_joined(column.name, [*base_scores, *arm_scores])
        return compare_scores(base_scores, arm_scores)
    values, others = ([c.values[seed] for seed in seeds] for c in (cell, other))
    return compare_seeds(np.array(values), np.array(others))


def _scores(column: Column, runs: list[RunResult], seeds: list[int]) -> list[Score]:
    """The benchmark's score for each seed, from the run that has it."""
    scores = {run.seed: run.scores[column.name] for run in runs if column.name in run.scores}
    return [scores[seed] for seed in seeds]


def _note_missing(table: Table, results: StudyResults) -> None:
    for run in results.runs:
        if not run.finished:
            why = f": {run.reason.splitlines()[0]}" if run.reason else ""
            table.notes.append(f"{run.arm} seed {run.seed} is {run.state}{why}")
    if table.baseline is not None and len(table.seeds) == 1:
        table.notes.append("one seed: the spread between seeds is unknown")
