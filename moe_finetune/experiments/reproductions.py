"""Studies that reproduce the papers, by kind; their code is ``eval/effects/``."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from moe_finetune.errors import DependencyError, RecipeError
from moe_finetune.evaluation.suites import eval_root
from moe_finetune.io.yaml_file import read_yaml

REPRODUCTIONS = {"miniature": "eval.effects.study", "strength": "eval.effects.strength"}
"""``kind:`` of a study -> the module that has it.

Its ``run(file, output, overrides, resume=, part=)`` returns the number of failed runs, its
``plan(file, overrides)`` the text of the plan.
"""


def reproduction_of(file: Path) -> Any:
    """The module that carries out the study in ``file``; None for ordinary studies."""
    try:
        values = read_yaml(file, RecipeError)
    except RecipeError:
        return None
    name = REPRODUCTIONS.get(values.get("kind", "")) if isinstance(values, dict) else None
    if name is None:
        return None
    if "eval" not in sys.modules:  # a folder without __init__.py, at the package's location
        spec = ModuleSpec("eval", None, is_package=True)
        spec.submodule_search_locations = [str(eval_root())]
        sys.modules["eval"] = module_from_spec(spec)
    return importlib.import_module(name)


def require_matplotlib() -> None:
    """Raise DependencyError before hours of runs whose pictures could not be drawn."""
    if find_spec("matplotlib") is None:
        raise DependencyError(
            "the study draws pictures with matplotlib, which is not installed; install it with "
            "pip install 'moe-finetune[pictures]'"
        )
