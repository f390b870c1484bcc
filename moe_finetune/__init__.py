"""Fine-tune Mixture-of-Experts language models with losses that make experts specialize."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_finetune.checkpoint.load_model import load_model
    from moe_finetune.recipe.schema import Recipe
    from moe_finetune.run import run_recipe
    from moe_finetune.training.callback.callback import SpecializationCallback
    from moe_finetune.training.specialization import Specialization, measure_strength

# ``python -m moe_finetune...`` has the working folder first on its path: a folder that somebody
# sent could bring its own ``yaml.py``. The folder stays only where it holds this package itself.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()] != [_HERE]:
    _words = sys.orig_argv
    if _words[_words.index("-m") + 1].partition(".")[0] == __name__:
        del sys.path[0]

__all__ = [
    "Recipe",
    "Specialization",
    "SpecializationCallback",
    "__version__",
    "load_model",
    "measure_strength",
    "run_recipe",
]
__version__ = "0.1.0"
_HOMES = {
    "Recipe": "moe_finetune.recipe.schema",
    "Specialization": "moe_finetune.training.specialization",
    "SpecializationCallback": "moe_finetune.training.callback.callback",
    "load_model": "moe_finetune.checkpoint.load_model",
    "measure_strength": "moe_finetune.training.specialization",
    "run_recipe": "moe_finetune.run",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: ``--help`` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moe_finetune' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
