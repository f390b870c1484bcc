"""Studies that reproduce the papers, by kind; their code is ``eval/effects/``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.evaluation.suites import eval_root
from moe_finetune.io.yaml_file import read_yaml


@dataclass(frozen=True)
class Reproduction:
    """The functions that carry out and plan studies of one ``kind:``.

    ``run(file, output, overrides, resume=, part=)`` returns the number of failed runs,
    ``plan(file, overrides)`` the text of the plan.
    """

    module: str
    run_name: str
    plan_name: str

    @property
    def run(self) -> Callable[..., int]:
        """The function that carries it out."""
        return self._function(self.run_name)

    @property
    def plan(self) -> Callable[..., str]:
        """The function that counts the runs."""
        return self._function(self.plan_name)

    def _function(self, name: str) -> Any:
        beside = str(eval_root().parent)
        if beside not in sys.path:
            sys.path.append(beside)
        return getattr(importlib.import_module(self.module), name)


REPRODUCTIONS = {
    "miniature": Reproduction("eval.effects.study", "run_miniature", "plan_miniature"),
    "strength": Reproduction("eval.effects.strength", "run_strength_study", "plan_strength_study"),
}


def reproduction_of(file: Path) -> Reproduction | None:
    """What carries out the study in ``file``; None for other studies and unreadable files."""
    try:
        values = read_yaml(file, RecipeError)
    except RecipeError:
        return None
    return REPRODUCTIONS.get(values.get("kind", "")) if isinstance(values, dict) else None
