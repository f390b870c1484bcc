"""What a study's folder holds: every run with its state, logs, routing and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import StudyError
from moe_finetune.evaluation.results import Results
from moe_finetune.evaluation.results import load_results as load_evaluation
from moe_finetune.evaluation.steps import step_results
from moe_finetune.experiments import folder as disk
from moe_finetune.io.json_file import read_object
from moe_finetune.io.rows import read_log
from moe_finetune.metrics import rmse

RMSE = "_rmse"


@dataclass(frozen=True)
class RunResult:
    """One run of a study.

    Attributes:
        arm, seed, values: as in :class:`~moe_finetune.experiments.expand.Run`.
        folder: the run's folder; it need not exist yet.
        state: ``finished``, ``started``, ``failed`` or ``missing``.
        reason: why it failed, else "".
        reference: the run of the same data and seed whose curves ``METRIC_rmse`` is measured from.
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
        return self.folder / "metrics.jsonl"

    @property
    def merged(self) -> Path:
        return self.folder / "merged"

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        try:
            return read_log(self.metrics_file)
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.metrics_file}: cannot be read ({error})") from None

    @cached_property
    def evaluation(self) -> Results | None:
        """The run's ``eval/results.json``, or None where the recipe evaluates nothing."""
        file = self.folder / "eval" / "results.json"
        return load_evaluation(file) if file.is_file() else None

    def curve(self, metric: str) -> dict[int, float]:
        """Every logged value of ``metric``, a routing metric's too, by step."""
        return {
            int(row["step"]): float(row[name])
            for name in (metric, f"routing/{metric}")
            for row in self.rows
            if name in row
        }

    def scores(self, benchmark: str) -> dict[int, float]:
        """The run's score after every step that was scored, and after its last one."""
        found = {step: held["tasks"].get(benchmark) for step, held in self._scored.items()}
        return {
            step: float(task["value"])
            for step, task in found.items()
            if task is not None and task["value"] is not None
        }

    @cached_property
    def _scored(self) -> dict[int, Results]:
        found = step_results(self.folder)
        if self.evaluation is not None and self.rows:
            found[max(int(row["step"]) for row in self.rows)] = self.evaluation
        return found

    def has(self, metric: str) -> bool:
        """Whether the run measured ``metric``, be its reference finished or not."""
        if metric.endswith(RMSE) and self.reference is not None:
            return bool(self.curve(metric.removesuffix(RMSE)))
        return self.value(metric) is not None

    def value(self, metric: str) -> float | None:
        """The last logged value of ``metric``, else its mean in ``routing/after.json``, or None.

        ``perplexity`` is that of the last validation loss; ``METRIC_rmse`` the root mean squared
        difference of the logged curve from the reference's, over the steps that both logged.
        """
        if metric == "perplexity":
            loss = self.value("eval_loss")
            return None if loss is None else float(np.exp(loss))
        if metric.endswith(RMSE) and self.reference is not None:
            return self._distance(metric.removesuffix(RMSE))
        for row in reversed(self.rows):
            if metric in row:
                return float(row[metric])
        after = self.folder / "routing" / "after.json"
        if not after.is_file():
            return None
        found = read_object(after, StudyError, "the run is damaged").get("metrics", {}).get(metric)
        return float(found["mean"]) if found else None

    def _distance(self, metric: str) -> float | None:
        if self.reference is None or not self.reference.finished:
            return None
        own, other = self.curve(metric), self.reference.curve(metric)
        steps = sorted(own.keys() & other.keys())
        return rmse([own[s] for s in steps], [other[s] for s in steps]) if steps else None


@dataclass(frozen=True)
class StudyResults:
    """A study's folder, read.

    Attributes:
        name, title, source: as in the recipe.
        axes: names of the values on each axis, in order.
        baseline: the baseline's value on the axes that it names.
        curves: the same of the arm whose logged curves ``METRIC_rmse`` is measured from.
        together: axes whose runs share a row of the table.
        benchmarks: labels to tabulate, or None for all.
        metrics: other values to tabulate, and which direction is better.
        runs: every run, in the order of the study.
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
    """Read the folder of a study, finished or not.

    Raises:
        StudyError: no study there, or a finished run that is damaged.
    """
    output = Path(output)
    if not (output / disk.MANIFEST).is_file():
        raise StudyError(f"{output}: holds no {disk.MANIFEST}; give the --output of a study")
    content = read_object(output / disk.MANIFEST, StudyError, "start the study again with --resume")
    if content.get("schema") != disk.SCHEMA:
        raise StudyError(f"{output / disk.MANIFEST}: is of another schema than {disk.SCHEMA}")
    curves = content.get("curves", {})
    found = {(row["arm"], row["seed"]): _run(output, row) for row in content["runs"]}
    runs = [
        replace(run, reference=found.get(("-".join((run.values | curves).values()), run.seed)))
        if curves
        else run
        for run in found.values()
    ]
    plain = (
        *("name", "title", "source", "axes", "seeds", "baseline", "together"),
        *("benchmarks", "metrics"),
    )
    return StudyResults(output, **{key: content[key] for key in plain}, curves=curves, runs=runs)


def _run(output: Path, row: dict[str, Any]) -> RunResult:
    name = f"{row['arm']}/seed_{row['seed']}"
    folder, state = disk.run_folder(output, name), disk.state_of(output, name)
    disk.check_finished(folder)
    reason = ""
    if state == "failed":
        failed = read_object(disk.failed_file(output, name), StudyError, "delete it")
        reason = str(failed.get("reason", ""))
    return RunResult(
        row["arm"], row["seed"], row["values"], folder, state, reason, row["recipe_sha256"]
    )
