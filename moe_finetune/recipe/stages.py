"""The stages of training: TRL's trainer, the keys of ``trainer:`` that it takes, its data's form.

A new stage is a name and an entry here. Nothing of TRL is imported before it is used.
"""

import dataclasses
import enum
import functools
import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from moe_finetune.recipe.section_base import Section

Name = Literal["sft", "pretrain", "dpo", "grpo"]
Form = Literal["tokens", "preference", "prompts"]


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        config: TRL's dataclass whose fields are the keys of ``trainer:``.
        form: the form of its rows: "tokens" (ids and labels, made here), "preference" (prompt,
            chosen, rejected), or "prompts" (a prompt, with any fields that its rewards read).
        reference: whether the loss needs the initial model.
    """

    name: Name
    trainer: str
    config: str
    form: Form
    reference: bool = False

    def trainer_class(self) -> Any:
        return getattr(importlib.import_module("trl"), self.trainer)

    def config_class(self) -> Any:
        return getattr(importlib.import_module("trl"), self.config)


class _Arguments(Section):
    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


@functools.cache
def trainer_section(stage: Stage) -> type[BaseModel]:
    """The fields of the stage's config as a section that checks types and :data:`LIMITS`."""
    config = stage.config_class()
    hints = typing.get_type_hints(config)
    return section_of(
        stage,
        {
            field.name: (_with_names(hints[field.name]), tuple(field.metadata.get("choices") or ()))
            for field in dataclasses.fields(config)
            if field.init
        },
    )


def section_of(stage: Stage, fields: Mapping[str, tuple[Any, tuple[str, ...]]]) -> type[BaseModel]:
    """A section of TRL's fields that a recipe can set: name -> type, and choices if there are."""
    checked: dict[str, Any] = {}
    for name, (hint, listed) in fields.items():
        if name not in OWNED:
            choices = CHOICES.get(name, listed)
            hint, limits = Literal[choices] | None if choices else hint, LIMITS.get(name)
            plain = limits is None or hint is Any
            checked[name] = (hint if plain else Annotated[hint, limits], None)
    return create_model(stage.config, __base__=_Arguments, **checked)


def _with_names(hint: Any) -> Any:
    """``hint``, or the names of its enum, where TRL takes any text."""
    for member in typing.get_args(hint) or (hint,):
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return Literal[tuple(option.value for option in member)]
    return hint


STAGES: dict[str, Stage] = {
    "sft": Stage("sft", "SFTTrainer", "SFTConfig", "tokens"),
    "pretrain": Stage("pretrain", "SFTTrainer", "SFTConfig", "tokens"),
    "dpo": Stage("dpo", "DPOTrainer", "DPOConfig", "preference", reference=True),
    "grpo": Stage("grpo", "GRPOTrainer", "GRPOConfig", "prompts"),
}


def trainer_value(stage: Stage, trainer: Mapping[str, Any], key: str) -> Any:
    """A value of ``trainer:``, or TRL's default; None if the stage's config has no such field."""
    if key in trainer:
        return trainer[key]
    field = stage.config_class().__dataclass_fields__.get(key)
    return field and field.default


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Names of one key and of its ``_kwargs``: transformers 5.23 renamed it, and the new name wins."""


def checkpointing(trainer: Mapping[str, Any], default: bool) -> bool:
    """Whether the keys of ``trainer:`` turn gradient checkpointing on."""
    values = (trainer.get(key) for key in CHECKPOINTING)
    return bool(next((value for value in values if value is not None), default))


STARTERS = ("sft", "dpo", "grpo")
"""Stages that ``init`` writes a recipe for."""

LIMITS = {
    "learning_rate": Field(ge=0, le=1),  # above 1 every optimizer here soon gives NaN weights
    "per_device_train_batch_size": Field(ge=1, le=2**20),
    "per_device_eval_batch_size": Field(ge=1, le=2**20),
    "gradient_accumulation_steps": Field(ge=1, le=2**20),
    "max_steps": Field(ge=1, lt=2**31),  # or -1
    "num_train_epochs": Field(gt=0),
    "warmup_steps": Field(ge=0),
    "weight_decay": Field(ge=0),
    "adam_beta1": Field(ge=0, lt=1),
    "adam_beta2": Field(ge=0, lt=1),
    "adam_epsilon": Field(gt=0),
    "max_grad_norm": Field(ge=0),
    "label_smoothing_factor": Field(ge=0, lt=1),
    "neftune_noise_alpha": Field(ge=0),
    "logging_steps": Field(gt=0),
    "eval_steps": Field(gt=0),
    "save_steps": Field(gt=0),
    "save_total_limit": Field(ge=1),
    "dataloader_num_workers": Field(ge=0),
    "dataloader_prefetch_factor": Field(ge=1),
    "seed": Field(ge=0, lt=2**32),
    "data_seed": Field(ge=0, lt=2**32),
    "max_completion_length": Field(ge=1),
    "temperature": Field(gt=0),
    "beta": Field(ge=0),  # below 0 a preference trains towards the rejected answer
    "label_smoothing": Field(ge=0, lt=0.5),
    "top_p": Field(gt=0, le=1),
    "top_k": Field(ge=0),
    "min_p": Field(ge=0, le=1),
    "repetition_penalty": Field(gt=0),
    "num_iterations": Field(ge=1),
    "steps_per_generation": Field(ge=1),
    "epsilon": Field(ge=0),
    "epsilon_high": Field(ge=0),
    "delta": Field(gt=0),
    "top_entropy_quantile": Field(gt=0, le=1),
    "entropy_coef": Field(allow_inf_nan=False),
    "ref_model_mixup_alpha": Field(ge=0, le=1),
    "ref_model_sync_steps": Field(ge=1),
    "eval_accumulation_steps": Field(ge=1),
    "ddp_timeout": Field(ge=1),
    "ddp_bucket_cap_mb": Field(ge=1),
    "eval_delay": Field(ge=0),
    "ld_alpha": Field(ge=0, le=1),
    "discopop_tau": Field(gt=0),
    "f_alpha_divergence_coef": Field(allow_inf_nan=False),
    "precompute_ref_batch_size": Field(ge=1),
    "vllm_gpu_memory_utilization": Field(gt=0, le=1),
    "vllm_tensor_parallel_size": Field(ge=1),
}
"""Limits of numbers that the libraries check late or not at all."""

CHOICES: dict[str, tuple[str, ...]] = {
    "torch_compile_mode": (
        *("default", "lite", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"),
    ),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": (
        *("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    ),
}
"""Names that the libraries list in words only; other lists are in their fields' metadata."""

UPLOAD = "use `hf upload OWNER/NAME RUN/merged`"
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
    "push_to_hub": UPLOAD,
    **{f"hub_{key}": UPLOAD for key in ("always_push", "model_id", "private_repo", "revision")},
    "hub_strategy": UPLOAD,
    "label_names": "the toolkit prepares the data",
    "length_column_name": "the toolkit prepares the data",
}
"""Fields of TRL's configs that a recipe cannot set, and what to do instead."""
