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

OWNED = {
    "output_dir": "it is --output on the command line",
    "resume_from_checkpoint": "it is --resume on the command line",
    "packing": "set data.packing",
    "eval_packing": "set data.packing",
    "packing_strategy": "set data.packing_strategy",
    "padding_free": "set data.packing",
    "max_length": "set data.max_length",
    "max_prompt_length": "set data.max_length",
    "reward_weights": "set rewards[].weight",
    "chat_template_kwargs": "set data.chat_template",
    "truncation_mode": "set data.overlong",
    "completion_only_loss": "set data.completion_only_loss",
    "assistant_only_loss": "set data.completion_only_loss",
    "dataset_num_proc": "set data.num_proc",
    "dataset_text_field": "set data.columns",
    "dataset_kwargs": "the toolkit prepares the data",
    "shuffle_dataset": "the trainer shuffles with trainer.seed",
    "chat_template_path": "set data.chat_template",
    "model_init_kwargs": "set the keys of model",
    "router_aux_loss_coef": "set method.terms.load_balance.weight",
    "remove_unused_columns": "the toolkit prepares the data",
    "trust_remote_code": "remote code is never run",
    "hub_token": "secrets stay out of recipes: set HF_TOKEN or use `hf auth login`",
    "local_rank": "the launcher sets it",
    "do_train": "use the verb `train`",
    "do_eval": "set data.validation",
    "do_predict": "use the verb `eval`",
    "deepspeed": "use FSDP2; see recipes/hardware",
    "parallelism_config": "use an accelerate config; see recipes/hardware",
    "push_to_hub": "use `hf upload OWNER/NAME RUN/merged`",
}
"""Fields of TRL's configs that a recipe cannot set, and what to do instead."""
