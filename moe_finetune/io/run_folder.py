"""A run's folder: the names of its files, the reader of its logs, and the inputs of commands."""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError, DataError, RecipeError
from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.environment import PACKAGES
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.hashes import sha256_file
from moe_finetune.io.json_file import JsonError, parse_json, read_object
from moe_finetune.plugins import missing_files

RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"


class RunFolder:
    """The files of a run, by name; none of them need exist.

    Attributes:
        recipe: the resolved recipe, written first; it marks the folder as a run.
        inputs: fingerprints of what training reads, an id of the run, and commits of hub ids.
        experts: the experts that get LoRA, where the run measured them.
        metrics: what training logged, one row per line.
        routing_before, routing_after, routing_steps: routing on the same sample before, after and
            during training.
        checkpoints: what interrupted training resumes from.
        adapter, merged: the trained weights; training writes one of them, and a merge the other.
        weights: both.
        evaluation, base_evaluation: folders of results, of the run and of the model before it.
        steps: states that ``evaluation.every`` kept, each a small run folder; see :meth:`step`.
        log: the output of the libraries.
        page: the report.
        finished: a study's note that the run is done.
    """

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.recipe = path / RECIPE_FILE
        self.environment = path / "environment.json"
        self.inputs = path / "inputs.json"
        self.experts = path / "experts.json"
        self.summary = path / "summary.json"
        self.log = path / "run.log"
        self.metrics = path / "metrics.jsonl"
        self.routing = path / "routing"
        self.routing_before = self.routing / "before.json"
        self.routing_after = self.routing / "after.json"
        self.routing_steps = self.routing / "steps.jsonl"
        self.checkpoints = path / "checkpoints"
        self.adapter = path / "adapter"
        self.merged = path / "merged"
        self.weights = (self.adapter, self.merged)
        self.evaluation = path / "eval"
        self.results = self.evaluation / RESULTS_FILE
        self.base_evaluation = path / "eval_base"
        self.base_results = self.base_evaluation / RESULTS_FILE
        self.steps = path / "steps"
        self.served = path / "served.json"
        self.page = path / "report" / "index.html"

    def has_run(self, resume: bool) -> bool:
        """Whether the folder has a run, which ``resume`` continues; refuses anything else."""
        if enter_folder(self.path, self.recipe, "a run", resume):
            return True
        if resume and not self.path.is_dir():
            raise RecipeError(f"--resume: {self.path} contains no run; start it without --resume")
        return False

    def step(self, step: int) -> RunFolder:
        """The state that training kept after ``step``, and its results."""
        return RunFolder(self.steps / str(step))

    def kept_steps(self) -> dict[int, RunFolder]:
        """The states that training kept, by step."""
        numbers = sorted(int(p.name) for p in self.steps.glob("[0-9]*") if p.name.isdecimal())
        return {step: self.step(step) for step in numbers}

    @property
    def finished(self) -> bool:
        """Return whether every stage of the run's recipe has ended."""
        return self.read_summary().get("finished") is True

    def finish(self) -> None:
        """Record that every stage has ended, with the hashes of the results."""
        self.note(finished=True, evidence=self.evidence())

    def evidence(self) -> dict[str, str]:
        """SHA-256 of each file that a study's table reads, by its path in the folder."""
        steps = [state.results for state in self.kept_steps().values()]
        samples = sorted(self.evaluation.glob("tasks/*/samples.jsonl"))
        files = (self.recipe, self.metrics, self.routing_after, self.results, *steps, *samples)
        return {str(f.relative_to(self.path)): sha256_file(f) for f in files if f.is_file()}

    @property
    def trained(self) -> bool:
        """Return whether training has finished: the adapter or model is saved last, and whole."""
        return any(path.exists() for path in self.weights)

    @property
    def merge_done(self) -> bool:
        """Return whether ``merged`` exists and, if it was made from an adapter, is recorded.

        A run killed between the merge and its note merges again, because the merged checkpoint does
        not contain what the note records.
        """
        return self.merged.exists() and (
            not self.adapter.exists() or "merge" in self.read_summary()
        )

    def discard(self, new_folder: bool) -> None:
        """Remove what a failed start wrote, unless training has; the whole folder if it is new."""
        products = (self.metrics, self.steps, *self.weights)
        if any(path.exists() for path in products) or any(self.checkpoints.glob("checkpoint-*")):
            return
        for folder in (self.routing, self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (
            *(self.recipe, self.inputs, self.experts),
            *(self.environment, self.summary, self.log),
        ):
            file.unlink(missing_ok=True)
        if new_folder and not any(self.path.iterdir()):
            self.path.rmdir()

    def read_summary(self) -> dict[str, Any]:
        remedy = "delete the file and repeat the command with --resume"
        return read_object(self.summary, CheckpointError, remedy) if self.summary.exists() else {}

    def note(self, **values: Any) -> None:
        """Add ``values`` to ``summary.json``."""
        summary = {**self.read_summary(), **values}
        write_atomic(self.summary, json.dumps(summary, indent=2) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log that a run appends to, each with its step; empty without a log.

    NaN is allowed. An incomplete last line, of a run that is writing or was killed, is dropped.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    *lines, unfinished = text.split("\n")
    rows = [
        _row(line, f"{path}:{line_number}")
        for line_number, line in enumerate(lines, 1)
        if line.strip()
    ]
    with suppress(DataError):  # complete if only the final line break is missing
        rows.append(_row(unfinished, f"{path}:{len(lines) + 1}"))
    return rows


def _row(line: str, location: str) -> dict[str, Any]:
    remedy = "delete the line, or run the training again"
    try:
        row = parse_json(line, finite=False)
    except JsonError as error:
        raise DataError(f"{location}: {error.problem}; {remedy}") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: must be an object, not {type(row).__name__}; {remedy}")
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
        raise DataError(f"{location}: 'step' is {step!r}, not a number; {remedy}")
    return row


def checkpoint_in(source: str | Path) -> str | Path:
    """The checkpoint that ``source`` names: a run's ``merged/``, or ``source`` itself."""
    path = Path(source)
    if (path / "config.json").is_file():
        return source
    run = RunFolder(path)
    if (run.merged / "config.json").is_file():
        return run.merged
    if run.adapter.is_dir() or (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} contains an adapter but no merged checkpoint; write one with 'moe-finetune "
            f"merge {path} --output DIR' and give that, or give the base with --adapter"
        )
    return source


def checkpoint_name(source: str | Path) -> str:
    """A name for the checkpoint that ``source`` names: of its folder, of its run, or the hub id."""
    if not Path(source).is_dir():
        return str(source)
    path = Path(os.path.abspath(source))  # a link keeps its name
    return path.parent.name if path.name == "merged" else path.name


def results_in(source: str | Path) -> Path:
    """The folder with ``results.json`` that ``source`` names: a run's ``eval/``, or ``source``."""
    path = Path(source)
    run = RunFolder(path)
    if not (path / RESULTS_FILE).is_file() and run.results.is_file():
        return run.evaluation
    return path


def missing_plugins(run: RunFolder) -> list[str]:
    """Plugin files that a run was trained with and that this process does not run."""
    if not run.environment.is_file():
        return []
    try:
        return missing_files(read_object(run.environment, CheckpointError, "").get("plugins"))
    except CheckpointError:  # another tool may also write it
        return []


def recipe_of_run(path: str | Path) -> Path | None:
    """``recipe.yaml`` of the run that ``path`` is or lies in; None outside runs.

    Other tools also write a ``recipe.yaml``; only a run's ``environment.json`` lists this package.
    """
    for run in (RunFolder(path), RunFolder(Path(path).parent)):
        if not run.recipe.is_file() or not run.environment.is_file():
            continue
        try:
            packages = read_object(run.environment, CheckpointError, "").get("packages")
        except CheckpointError:  # another tool may also write it
            continue
        if isinstance(packages, dict) and PACKAGES[0] in packages:
            return run.recipe
    return None
