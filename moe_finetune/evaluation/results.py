"""The typed schema of results.json, and its samples files."""

from pathlib import Path
from typing import (
    Any,
    Required,  # typing's, which pydantic reads from 3.12
)

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from moe_finetune.errors import EvaluationError
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RESULTS_FILE, RunFolder

SCHEMA = 1


class Metric(TypedDict):
    """A metric's value with its standard error (None if lm-eval has none)."""

    value: float | None
    stderr: float | None


class TaskResult(TypedDict, total=False):
    """One suite line's result.

    ``metrics`` and ``subtasks`` are keyed ``"metric,filter"``; ``value`` and ``stderr`` repeat the
    suite's headline metric, and ``higher_is_better`` is what lm-eval declares for it. ``samples``
    is relative to the results folder.
    """

    task: str
    version: float | str | None
    shots: int | None
    chat: bool
    enable_thinking: bool | None
    max_tokens: int | None
    metric: str
    filter: str
    higher_is_better: bool | None
    value: Required[float | None]
    stderr: float | None
    chance: float | None
    n: int
    metrics: dict[str, Metric]
    subtasks: dict[str, dict[str, Any]]
    key: str
    config_sha256: str
    data_sha256: dict[str, Any]
    samples: str
    usage: dict[str, Any]
    wall_seconds: float
    notes: list[str]


class Results(TypedDict, total=False):
    """The whole of results.json."""

    schema: int
    complete: bool
    suite: dict[str, str]
    checkpoint: dict[str, str]
    backend: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    tasks: Required[dict[str, TaskResult]]
    unfinished: list[str]
    notes: list[str]
    started: str
    wall_seconds: float


_SCHEMA = TypeAdapter(Results)
SAMPLE = ("task", "item", "filter", "prompt_sha256")
"""Text fields of a row of samples by which answers are compared."""


def load_results(path: str | Path) -> Results:
    """Read ``results.json``, given the file or its folder."""
    path = Path(path)
    if path.is_dir():
        path = path / RESULTS_FILE
    if not path.is_file():
        run, how = RunFolder(path.parent), "run 'moe-finetune eval' first"
        if run.recipe.is_file():
            path = run.results
            how = (
                f"score the run with 'moe-finetune eval {run.path} --suite NAME', which writes "
                f"{run.evaluation}"
            )
        raise EvaluationError(f"no results at {path}; {how}")
    content = read_object(path, EvaluationError, "evaluate again", finite=False)
    if content.get("schema") != SCHEMA:
        raise EvaluationError(f"{path}: not a results file of schema {SCHEMA}; evaluate again")
    try:
        _SCHEMA.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise EvaluationError(f"{path}: {key}: {first['msg']}; evaluate again") from None
    return content  # type: ignore[return-value]


def results_text(results: Results) -> str:
    """A line for each task: its score, standard error and items; what other packages evaluate."""
    lines = []
    for label, task in results["tasks"].items():
        value, stderr = task["value"], task["stderr"]
        score = "not scored" if value is None else f"{value:.4f}"
        error = f" ± {stderr:.4f}" if stderr is not None else ""
        lines.append(f"{label}: {task['metric']} {score}{error} (n={task['n']})")
    external = results.get("suite", {}).get("external")
    return "\n".join([*lines, *([external] if external else [])])


def step_results(run: Path) -> dict[int, Results]:
    """The results of the scored states of ``evaluation.every``, by step."""
    files = {step: state.results for step, state in RunFolder(run).kept_steps().items()}
    results = {step: load_results(file) for step, file in files.items() if file.is_file()}
    return {step: scores for step, scores in results.items() if scores.get("complete")}


def samples_file(folder: str | Path, task: TaskResult) -> Path:
    """Return the file of a task's per-item samples in ``folder``."""
    name = task.get("samples")
    if not isinstance(name, str):
        raise EvaluationError(f"{folder}: a result has no file of samples; evaluate again")
    return Path(folder) / name


def load_samples(folder: str | Path, task: TaskResult) -> list[dict[str, Any]]:
    """Read the per-item samples of one task."""
    from moe_finetune.io.row_files import read_rows

    return read_rows(samples_file(folder, task))
