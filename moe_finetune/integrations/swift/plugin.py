"""ms-swift's external plugin: registers the callback ``specialization``.

Run ``swift sft --external_plugins .../integrations/swift/plugin.py --callbacks specialization``.
The method is in the environment variable ``SPECIALIZATION``, because ms-swift passes a callback no
custom arguments: a preset's name, or a YAML mapping such as ``{preset: orthogonal_variance, share:
0.1, output: runs/mine}``.
"""

from __future__ import annotations

import os
from typing import Any

import yaml
from swift.callbacks import callbacks_map

from moe_finetune.errors import RecipeError
from moe_finetune.training.callback.callback import SpecializationCallback

VARIABLE = "SPECIALIZATION"


def section_from_environment() -> Any:
    """The method in the environment variable, or None."""
    try:
        return yaml.safe_load(os.environ.get(VARIABLE, ""))
    except yaml.YAMLError as error:
        raise RecipeError(f"{VARIABLE}: not YAML: {error}") from None


class SwiftSpecialization(SpecializationCallback):
    """The callback as ms-swift builds it, from its arguments and trainer.

    The trainer is still incomplete then, so it is read when training begins.
    """

    def __init__(self, args: Any, trainer: Any):
        section = section_from_environment()
        method, options = self.split_section(section)
        super().__init__(method, **options)
        self._swift_trainer = trainer

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.read_from(self._swift_trainer)
        return super().on_train_begin(args, state, control, model, **kwargs)


callbacks_map["specialization"] = SwiftSpecialization
