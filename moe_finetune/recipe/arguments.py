"""``trainer:`` keys of a recipe, checked by name and type against TRL's class for the stage."""

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from moe_finetune.recipe.stages import OWNED, STAGES, Stage
from moe_finetune.recipe.validation import expectation

_BATCH = (lambda v: 1 <= v <= 2**20, "from 1 to 1048576")
_AT_LEAST_1 = (lambda v: v >= 1, "1 or more")
_NOT_NEGATIVE = (lambda v: v >= 0, "0 or more")
_POSITIVE = (lambda v: v > 0, "more than 0")
_DECAY = (lambda v: 0 <= v < 1, "from 0 to below 1")
_SEED = (lambda v: 0 <= v < 2**32, "from 0 to 4294967295")
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    # Above 1 every optimizer here gives NaN weights after a step or two.
    "learning_rate": (lambda v: 0 <= v <= 1, "from 0 to 1, such as 1.0e-4"),
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "max_steps": (
        lambda v: v == -1 or 1 <= v < 2**31,
        "from 1 to 2147483647, or -1 to count epochs",
    ),
    "num_train_epochs": _POSITIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_epsilon": _POSITIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "label_smoothing_factor": _DECAY,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "logging_steps": _POSITIVE,
    "eval_steps": _POSITIVE,
    "save_steps": _POSITIVE,
    "save_total_limit": _AT_LEAST_1,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "seed": _SEED,
    "data_seed": _SEED,
}
"""Ranges of numbers that the libraries check late or not at all."""


def ranges() -> dict[str, str]:
    """What a number in ``trainer:`` must be, by key, in words."""
    return {name: text for name, (_, text) in _RANGES.items()}


def check_trainer(
    trainer: Mapping[str, Any],
    stage: Stage,
    elsewhere: Callable[[str], str | None] = lambda name: None,
) -> Iterator[str]:
    """Yield a line for each ``trainer:`` key that is unknown, reserved, mistyped or refused.

    Args:
        elsewhere: returns the recipe's key of this name outside ``trainer:``, if there is one.
    """
    fields = _fields(stage)
    for name, value in trainer.items():
        if name in OWNED:
            yield f"trainer.{name}: cannot be set here: {OWNED[name]}"
        elif name not in fields:
            near = get_close_matches(str(name), fields.keys() - OWNED.keys(), n=1, cutoff=0.75)
            key = near[0] if near else elsewhere(str(name))
            others = [other for other in STAGES.values() if name in _fields(other)]
            hint = f"did you mean '{key}'?" if key else "docs/reference/trainer.md lists its keys"
            if others and not near:
                names = " or ".join(other.name for other in others)
                hint = f"it belongs to stage {names}: set stage: {others[0].name}"
            yield f"trainer.{name}: unknown key of TRL's {stage.config}; {hint}"
        else:
            expected = _mismatch(fields[name], value) or _out_of_range(name, value)
            if expected:
                quotes = (
                    '; YAML reads an unquoted no as false, so write "no"' if value is False else ""
                )
                yield f"trainer.{name}: must be {expected}, not {value!r}{quotes}"
    if trainer.get("fp16") is True or trainer.get("fp16_full_eval") is True:
        yield (
            "trainer.fp16: its loss scaling would not scale the losses that are added inside "
            "the layers; use bf16 (model.dtype: bfloat16)"
        )
    yield from _liger(trainer)
    kwargs = trainer.get("gradient_checkpointing_kwargs")
    if isinstance(kwargs, dict) and kwargs.get("use_reentrant"):
        yield (
            "trainer.gradient_checkpointing_kwargs: reentrant checkpointing gives wrong gradients "
            "of losses that join two layers; set use_reentrant: false"
        )


def _liger(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each part of Liger's kernels that replaces what the losses read."""
    config = trainer.get("liger_kernel_config") or {}
    if not trainer.get("use_liger_kernel"):
        if config:
            yield "trainer.liger_kernel_config: has no effect; set use_liger_kernel: true"
        return
    if isinstance(config, dict) and config.get("swiglu", True):
        yield (
            "trainer.liger_kernel_config: Liger's swiglu, on unless it is named, replaces the "
            "experts' forward that the losses read; set liger_kernel_config: {swiglu: false}, "
            "which keeps its RoPE, norm and cross-entropy kernels"
        )
    if isinstance(config, dict) and config.get("fused_linear_cross_entropy"):
        yield (
            "trainer.liger_kernel_config: fused_linear_cross_entropy replaces the model's forward, "
            "and TRL fuses the loss itself; leave it out"
        )


def _out_of_range(name: str, value: Any) -> str | None:
    """The range that the number must be in; None if it is in range."""
    if name not in _RANGES or value is None:
        return None
    right, range_text = _RANGES[name]
    return None if right(value) else range_text


@functools.cache
def _fields(stage: Stage) -> dict[str, Any]:
    config = stage.config_class()
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config) if field.init}


def _mismatch(hint: Any, value: Any) -> str | None:
    """The type that ``hint`` expects if ``value`` does not fit, else None; enums accept names."""
    members = typing.get_args(hint) or (hint,)
    enums = [m for m in members if isinstance(m, type) and issubclass(m, enum.Enum)]
    if enums and isinstance(value, str):
        names = [member.value for member in enums[0]]
        return None if value in names else f"one of {', '.join(names)}"
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(strict=True))
        adapter.validate_python(value)
    except PydanticSchemaGenerationError:
        return None
    except ValidationError as error:
        return " or ".join(dict.fromkeys(expectation(e["msg"]) for e in error.errors()))
    return None
