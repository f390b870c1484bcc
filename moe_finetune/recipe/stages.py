"""The stages of training: TRL's trainer, its arguments, and the form of the data.

A new stage is an entry here. Nothing of TRL is imported before it is used.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from moe_finetune.errors import RecipeError
from moe_finetune.registry import Registry

Form = Literal["tokens", "preference", "prompts"]


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        name: value of ``stage:``.
        title: name for display.
        trainer: TRL's trainer.
        config: its arguments, a dataclass whose fields are the keys of ``trainer:``.
        form: the form of its rows: "tokens" (ids and labels, made here), "preference" (prompt,
            chosen, rejected), or "prompts" (a prompt, with any fields that its rewards read).
        reference: whether the loss needs the initial model.
    """

    name: str
    title: str
    trainer: str
    config: str
    form: Form
    reference: bool = False

    def trainer_class(self) -> Any:
        return getattr(importlib.import_module("trl"), self.trainer)

    def config_class(self) -> Any:
        return getattr(importlib.import_module("trl"), self.config)


STAGES: Registry[Stage] = Registry("stage", RecipeError)
for _stage in (
    Stage("sft", "supervised fine-tuning", "SFTTrainer", "SFTConfig", "tokens"),
    Stage("pretrain", "continued pretraining", "SFTTrainer", "SFTConfig", "tokens"),
    Stage("dpo", "direct preference optimization", "DPOTrainer", "DPOConfig", "preference",
          reference=True),
    Stage("grpo", "group relative policy optimization", "GRPOTrainer", "GRPOConfig", "prompts"),
):  # fmt: skip
    STAGES.register(_stage.name, _stage)
