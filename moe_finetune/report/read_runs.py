"""Read a run's folder: results only, never a model."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.evaluation.results import load_results, step_results
from moe_finetune.evaluation.score import Score
from moe_finetune.io.counted import counted
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.report.markup import is_number
from moe_finetune.report.routing_snapshots import Routing

AXES = ("kind", "step", "epoch")


@dataclass
class Curve:
    """A logged value over the steps, sorted; a step logged twice (after a resume) counts once."""

    steps: list[float]
    values: list[float]

    @property
    def by_step(self) -> dict[float, float]:
        """The finite values."""
        pairs = zip(self.steps, self.values, strict=True)
        return {step: value for step, value in pairs if math.isfinite(value)}


@dataclass(frozen=True)
class Run:
    """The contents of one run's files; the field of a missing file is empty."""

    path: Path
    label: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    curves: dict[str, Curve]
    last_values: dict[str, Any]  # the last of each logged value that is not a number
    routing_before: Routing | None
    routing_after: Routing | None
    routing_steps: dict[float, Routing]  # at each evaluation
    scores: dict[str, Score]
    base_scores: dict[str, Score]
    evaluation: dict[str, Any]  # results.json without its scores: backend, checkpoint, ...
    served: dict[str, Any]  # the last verdict of `verify --served`

    @property
    def method(self) -> str | None:
        method = self.recipe.get("method")
        if not isinstance(method, dict):
            return method
        return method.get("preset") or ", ".join(method.get("terms") or {}) or None

    @property
    def stage(self) -> str:
        return self.recipe.get("stage") or "sft"

    @property
    def model(self) -> str | None:
        """The base checkpoint as the recipe names it; ``~`` for the home folder."""
        model = self.recipe.get("model")
        path = model.get("path") if isinstance(model, dict) else model
        home = f"{Path.home()}/"
        return f"~/{path.removeprefix(home)}" if path and path.startswith(home) else path

    @property
    def collapse(self) -> str | None:
        """A sentence on routing collapse in training; None if there was none."""
        collapse = self.routing_after.collapse() if self.routing_after is not None else None
        if collapse and self.routing_before is not None and self.routing_before.collapse():
            return collapse.replace(
                "Routing collapsed:", "Routing is collapsed, as before training:"
            )
        return collapse

    @property
    def last_step(self) -> float | None:
        steps = [curve.steps[-1] for curve in self.curves.values() if curve.steps]
        return max(steps, default=None)


def losses_compare(one: Run, other: Run) -> bool:
    """Whether both runs trained the same base model with the same stage's loss."""
    return (one.stage, one.model) == (other.stage, other.model)


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """Return the run folders: each path itself, or the runs directly inside it, by name."""
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError(f"{path}: no such folder; give the --output folder of a run")
        inside = [path] if _is_run(path) else sorted(p for p in path.iterdir() if _is_run(p))
        if not inside:
            files = ", ".join(str(file.relative_to(path)) for file in _marks(path))
            raise DataError(f"{path}: no results of a run; a run's folder contains some of {files}")
        folders += inside
    if not folders:
        raise DataError("no run given; give the --output folder of at least one run")
    return folders


def _is_run(path: Path) -> bool:
    return path.is_dir() and any(file.is_file() for file in _marks(path))


def _marks(path: Path) -> tuple[Path, ...]:
    """The files that mark a run's folder, which contains at least one of them."""
    run = RunFolder(path)
    files = (run.recipe, run.metrics, run.summary, run.environment)
    return (*files, run.results, run.routing_before, run.routing_after)


def read_runs(paths: Iterable[Path | str], labels: Sequence[str] | None = None) -> list[Run]:
    """Read run folders, each with a unique label (by default the folder's name)."""
    folders = find_runs(paths)
    if labels is not None and len(labels) != len(folders):
        counts = f"{counted(len(labels), 'label')} for {counted(len(folders), 'run')}"
        raise DataError(f"{counts}; give one for each run")
    names = list(labels) if labels is not None else _labels(folders)
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _labels(folders: list[Path]) -> list[str]:
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    longer = [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in folders]
    if len(set(longer)) == len(longer):
        return longer
    return [f"{index + 1}: {name}" for index, name in enumerate(longer)]


def read_run(folder: Path, label: str) -> Run:
    """Read one run's folder."""
    files = RunFolder(folder)
    curves, last_values = read_curves(files)
    results, scores = read_results(files.results)
    return Run(
        path=folder,
        label=label,
        recipe=_read_yaml(files.recipe),
        environment=_read_json(files.environment),
        summary=_read_json(files.summary),
        curves=curves,
        last_values=last_values,
        routing_before=_read_routing(files.routing_before),
        routing_after=_read_routing(files.routing_after),
        routing_steps=_read_steps(files.routing_steps),
        scores=scores,
        base_scores=read_results(files.base_results)[1],
        evaluation={k: v for k, v in results.items() if k != "tasks"},
        served=_read_json(files.served),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return read_object(path, DataError, "remove the file to leave it out", finite=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    data = read_yaml(path, DataError)
    if not isinstance(data, dict):
        raise DataError(f"{path}: expected a mapping, found {type(data).__name__}")
    return data


def _read_routing(path: Path) -> Routing | None:
    data = _read_json(path)
    return Routing.parse(data, path) if data else None


def _read_steps(path: Path) -> dict[float, Routing]:
    return {float(row["step"]): Routing.parse(row, path) for row in read_log(path)}


def read_curves(run: RunFolder) -> tuple[dict[str, Curve], dict[str, Any]]:
    """What a run logged: numbers are curves by name, of other values the last is kept.

    The scores of kept steps and of the end are curves ``scores/TASK``.
    """
    points: dict[str, dict[float, float]] = {}
    others: dict[str, Any] = {}
    for row in read_log(run.metrics):
        step, kind = float(row["step"]), row.get("kind", "train")
        for key, value in row.items():
            if key in AXES:
                continue
            name = key if kind in ("train", "eval") else f"{kind}/{key}"
            if value is None:
                value = math.nan
            if is_number(value):
                points.setdefault(name, {})[step] = float(value)
            else:
                others[name] = value
    scored = step_results(run.path)
    if scored and points and run.results.is_file():
        scored[int(max(max(by_step) for by_step in points.values()))] = load_results(run.results)
    for step, results in scored.items():
        for task, score in results["tasks"].items():
            value = math.nan if score["value"] is None else float(score["value"])
            points.setdefault(f"scores/{task}", {})[float(step)] = value
    curves = {}
    for name, by_step in points.items():
        steps = sorted(by_step)
        curves[name] = Curve(steps, [by_step[step] for step in steps])
    return curves, others


def read_results(path: Path) -> tuple[dict[str, Any], dict[str, Score]]:
    """An evaluation's ``results.json``, and its scores by task; empty if there is no file."""
    results = _read_json(path)
    tasks = results.get("tasks") or {}
    if not isinstance(tasks, dict):
        raise DataError(f"{path}: 'tasks' must map a task's name to its score")
    scores = {}
    for name, task in tasks.items():
        if not isinstance(task, dict) or "value" not in task:
            raise DataError(f"{path}: task '{name}' has no 'value'; evaluate again")
        scores[name] = Score.parse(task, path.parent)
    return results, scores


def ends(curve: Curve) -> tuple[float, float]:
    """Return a curve's start and end: means of its first and last twentieth, NaN if empty."""
    known = [v for v in curve.values if math.isfinite(v)]
    if not known:
        return math.nan, math.nan
    count = max(1, len(known) // 20)
    return sum(known[:count]) / count, sum(known[-count:]) / count
