"""Scores during training: a run's ``steps/N/`` has the state after step N, then its results.

Until it is scored it contains the weights (``adapter/`` or ``merged/``), then
``eval/results.json``.
"""

from __future__ import annotations

from pathlib import Path

from moe_finetune.evaluation.results import Results, load_results
from moe_finetune.io.run_folder import RunFolder


def step_results(run: Path) -> dict[int, Results]:
    """The results of the scored states, by step.

    Raises:
        EvaluationError: one is damaged.
    """
    files = {step: state.results for step, state in RunFolder(run).kept_steps().items()}
    results = {step: load_results(file) for step, file in files.items() if file.is_file()}
    return {step: scores for step, scores in results.items() if scores.get("complete")}
