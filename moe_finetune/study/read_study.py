"""Read a study's folder: every run with its state, logs, routing and evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import StudyError
from moe_finetune.evaluation.results import Results
from moe_finetune.evaluation.results import load_results as load_evaluation
from moe_finetune.evaluation.score import Score, scores_of
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.report.read_runs import Curve, read_curves
from moe_finetune.study import folder as disk

RMSE = "_rmse"
PERPLEXITY, AVERAGE = "perplexity", "average"


@dataclass(frozen=True)
class RunResult:
    """One run of a study, whose ``folder`` need not exist yet.

    ``state`` is finished, started, failed (for a ``reason``) or missing. ``METRIC_rmse`` is
    computed against the curves of ``reference``, the run with the same data and seed.
    """

    arm: str
    seed: int
    values: dict[str, str]
    folder: Path
    state: disk.State
    reason: str
    recipe_sha256: str
    reference: RunResult | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}/seed_{self.seed}"

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def metrics_file(self) -> Path:
        return RunFolder(self.folder).metrics

    @property
    def merged(self) -> Path:
        return RunFolder(self.folder).merged

    @cached_property
    def evaluation(self) -> Results | None:
        """The run's ``eval/results.json``, or None if the recipe evaluates nothing."""
        file = RunFolder(self.folder).results
        return load_evaluation(file) if file.is_file() else None

    @cached_property
    def scores(self) -> dict[str, Score]:
        """The run's benchmarks that are scored."""
        folder = RunFolder(self.folder).evaluation
        return scores_of(self.evaluation, folder) if self.evaluation else {}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        return read_curves(RunFolder(self.folder))[0]

    def curve(self, metric: str) -> dict[float, float]:
        """Every logged value of ``metric`` by step.

        A routing metric is from training if training logs it, else from the validation sample.
        ``perplexity`` is from the validation loss; ``average`` is the mean over the benchmarks at
        steps after which all were scored.
        """
        if metric == PERPLEXITY:
            return {step: math.exp(loss) for step, loss in self.curve("eval_loss").items()}
        if metric == AVERAGE:
            return mean_curve([self._scores(name) for name in self.scores])
        names = (metric, f"end/{metric}", f"routing/{metric}", f"eval_routing/{metric}")
        name = next((name for name in names if name in self.curves), None)
        return self.curves[name].by_step if name else {}

    def _scores(self, benchmark: str) -> dict[float, float]:
        """The scores on the way and at the end; without the former, one point at the last step."""
        if curve := self.curve(f"scores/{benchmark}"):
            return curve
        last = max((curve.steps[-1] for curve in self.curves.values()), default=None)
        return {} if last is None else {last: self.scores[benchmark].value}

    def has(self, metric: str) -> bool:
        """Return whether the run measured ``metric``, even if its reference is not finished."""
        if metric.endswith(RMSE) and self.reference is not None:
            return bool(self.curve(metric.removesuffix(RMSE)))
        return self.value(metric) is not None

    def value(self, metric: str) -> float | None:
        """The last logged value of ``metric``, else its mean in ``routing/after.json``, or None.

        ``perplexity`` is from the last validation loss; ``METRIC_rmse`` is the root mean squared
        difference between the logged curve and the reference's, over the steps that both logged.
        """
        if metric == PERPLEXITY:
            loss = self.value("eval_loss")
            return None if loss is None else math.exp(loss)
        if metric.endswith(RMSE) and self.reference is not None:
            return self._distance(metric.removesuffix(RMSE))
        for name in (metric, f"end/{metric}"):
            if name in self.curves:
                return self.curves[name].values[-1]
        snapshot = RunFolder(self.folder).routing_after
        if not snapshot.is_file():
            return None
        measured = (
            read_object(snapshot, StudyError, "the run is damaged").get("metrics", {}).get(metric)
        )
        return float(measured["mean"]) if measured else None

    def _distance(self, metric: str) -> float | None:
        if self.reference is None or not self.reference.finished:
            return None
        curve, other = self.curve(metric), self.reference.curve(metric)
        squares = [(curve[step] - other[step]) ** 2 for step in sorted(curve.keys() & other)]
        return math.sqrt(sum(squares) / len(squares)) if squares else None  # P0 eq. 43


def mean_curve(curves: list[dict[float, float]]) -> dict[float, float]:
    """Mean of curves, by step, at the steps that all of them have."""
    shared = set.intersection(*map(set, curves)) if curves else set()
    return {step: float(np.mean([curve[step] for curve in curves])) for step in sorted(shared)}


@dataclass(frozen=True)
class StudyResults:
    """The contents of a study's folder.

    Attributes:
        axes: names of the values on each axis, in order.
        baseline: the baseline's value on the axes that it names.
        curves: the same for the arm against whose curves ``METRIC_rmse`` is computed.
        together: axes whose runs share a row of the table.
        benchmarks: labels to tabulate, or None for all.
        metrics: other values to tabulate, and which direction is better.
    """

    folder: Path
    name: str
    title: str
    source: str
    axes: dict[str, list[str]]
    seeds: list[int]
    baseline: dict[str, str]
    curves: dict[str, str]
    together: list[str]
    benchmarks: list[str] | None
    metrics: dict[str, str]
    runs: list[RunResult] = field(default_factory=list)

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.finished]

    def of(self, arm: str) -> list[RunResult]:
        return [run for run in self.finished if run.arm == arm]

    @property
    def arms(self) -> dict[str, dict[str, str]]:
        return {run.arm: run.values for run in self.runs}


def load_results(output: str | Path) -> StudyResults:
    """Read the folder of a study, finished or not."""
    output = Path(output)
    if not (output / disk.MANIFEST).is_file():
        raise StudyError(f"{output}: has no {disk.MANIFEST}; give the --output of a study")
    content = read_object(output / disk.MANIFEST, StudyError, "start the study again with --resume")
    if content.get("schema") != disk.SCHEMA:
        raise StudyError(
            f"{output / disk.MANIFEST}: has a schema other than {disk.SCHEMA}; use the version "
            "of moe-finetune that wrote it"
        )
    curves = content.get("curves", {})
    runs_by_key = {(row["arm"], row["seed"]): _run(output, row) for row in content["runs"]}
    runs = [
        replace(
            run, reference=runs_by_key.get(("-".join((run.values | curves).values()), run.seed))
        )
        if curves
        else run
        for run in runs_by_key.values()
    ]
    plain = (
        *("name", "title", "source", "axes", "seeds", "baseline", "together"),
        *("benchmarks", "metrics"),
    )
    return StudyResults(output, **{key: content[key] for key in plain}, curves=curves, runs=runs)


def _run(output: Path, row: dict[str, Any]) -> RunResult:
    name = f"{row['arm']}/seed_{row['seed']}"
    run = disk.run_folder(output, name)
    state = disk.state_of(output, name)
    reason = ""
    if state == "finished":
        disk.check_evidence(run)
    if state == "failed":
        reason = disk.failed_file(output, name).read_text(encoding="utf-8")
    return RunResult(
        arm=row["arm"],
        seed=row["seed"],
        values=row["values"],
        folder=run.path,
        state=state,
        reason=reason,
        recipe_sha256=row["recipe_sha256"],
    )
