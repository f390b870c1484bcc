"""Scores on the way: a run's ``steps/N/`` is what training left after step N, and its results.

Until it is scored it holds the weights (``adapter/`` or ``merged/``), then ``eval/results.json``.
"""

from __future__ import annotations

from pathlib import Path

from moe_finetune.evaluation.results import Results, load_results

STEPS = "steps"
WEIGHTS = ("adapter", "merged")


def step_folder(run: Path, step: int) -> Path:
    """Where the state after ``step`` is kept and scored."""
    return run / STEPS / str(step)


def step_folders(run: Path) -> dict[int, Path]:
    """The folders of the states that were kept, by step."""
    found = (run / STEPS).glob("[0-9]*")
    return dict(sorted((int(path.name), path) for path in found if path.name.isdecimal()))


def step_results(run: Path) -> dict[int, Results]:
    """The results of the states that are scored, by step.

    Raises:
        EvaluationError: one is damaged.
    """
    files = {step: folder / "eval" / "results.json" for step, folder in step_folders(run).items()}
    found = {step: load_results(file) for step, file in files.items() if file.is_file()}
    return {step: results for step, results in found.items() if results.get("complete")}
