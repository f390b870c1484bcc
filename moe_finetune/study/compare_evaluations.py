"""``compare``: finished evaluations as a study of one seed, of which the first is the baseline.

Results with different items or prompts are refused, because they would explain the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.results import Results, load_results
from moe_finetune.evaluation.score import Score, scores_of
from moe_finetune.study.read_study import RunResult, StudyResults
from moe_finetune.study.table import Table, make_table


@dataclass(frozen=True)
class Evaluated(RunResult):
    """A file of results as a finished run, which has no log."""

    @cached_property
    def evaluation(self) -> Results:
        return load_results(self.folder)

    @cached_property
    def scores(self) -> dict[str, Score]:
        return scores_of(self.evaluation, self.results_folder)

    @property
    def results_folder(self) -> Path:
        return self.folder if self.folder.is_dir() else self.folder.parent

    def value(self, metric: str) -> float | None:
        return None

    def curve(self, metric: str) -> dict[float, float]:
        return {}


def compare(
    results: Sequence[Path], names: Sequence[str] | None = None
) -> tuple[StudyResults, Table]:
    """Compare evaluations (folders or results.json), the first of which is the baseline."""
    if len(results) < 2:
        raise EvaluationError("compare needs at least two results; the first is the baseline")
    labels = list(names) if names else result_names(results)
    runs = [
        Evaluated(
            arm=label,
            seed=0,
            values={"results": label},
            folder=Path(path),
            state="finished",
            reason="",
            recipe_sha256="",
        )
        for label, path in zip(labels, results, strict=True)
    ]
    for label, run in zip(labels[1:], runs[1:], strict=True):
        if not runs[0].scores.keys() & run.scores.keys():
            raise EvaluationError(f"{labels[0]} and {label} have no task in common")
    study = StudyResults(
        folder=Path(results[0]), name="comparison", title=f"Comparison with {labels[0]}", source="",
        axes={"results": labels}, seeds=[0], baseline={"results": labels[0]}, curves={},
        together=[], benchmarks=None, metrics={}, runs=list(runs),
    )  # fmt: skip
    table = make_table(study)
    table.notes[:] = [*_unfinished(runs), *_other_backends(labels, [r.evaluation for r in runs])]
    return study, table


def _unfinished(runs: Sequence[Evaluated]) -> list[str]:
    return [
        f"{run.results_folder} is incomplete: "
        f"{', '.join(run.evaluation.get('unfinished', []))} not finished"
        for run in runs
        if not run.evaluation.get("complete", True)
    ]


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
    listed = ", ".join(f"{label} by {how}" for label, how in zip(labels, ran, strict=True))
    return [f"note: evaluated {listed}; part of a difference may come from that"]


def result_names(results: Iterable[str | Path]) -> list[str]:
    """Return a short, unique name for each folder of results."""
    names = []
    for path in results:
        folder = Path(path).resolve()
        folder = folder if folder.is_dir() else folder.parent
        suffix = {"eval": "", "eval_base": " before"}.get(folder.name)
        names.append(folder.name if suffix is None else f"{folder.parent.name}{suffix}")
    twice = {n for n in names if names.count(n) > 1}
    return [f"{n} ({i})" if n in twice else n for i, n in enumerate(names, 1)]
