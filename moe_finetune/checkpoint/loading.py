"""Load the model of a checkpoint, with all of its tensors and without remote code."""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.errors import (
    CheckpointError,
    DependencyError,
    RecipeError,
    UnsupportedModelError,
)
from moe_finetune.io.config_file import check_kernel
from moe_finetune.models import opened_as
from moe_finetune.models.loading import local_folder
from moe_finetune.models.structure import class_of, meta_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def load_model(
    source: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
    quantization: str | None = None,
    expert_ranks: int = 1,
    **options: Any,
) -> PreTrainedModel:
    """Return the causal language model of a checkpoint, in eval mode.

    Args:
        source: folder or hub id, or a checkpoint that was opened with ``values``.
        dtype: of the weights; "auto" keeps the checkpoint's.
        device_map: as in ``from_pretrained``; with ``quantization`` one device, by default this
            process's GPU if it has one.
        quantization: "nf4" or "int8" quantizes experts and linear layers while they are read, one
            expert at a time. They are frozen and train through an adapter. See
            :mod:`moe_finetune.checkpoint.load_quantized`.
        expert_ranks: number of ranks that share the routed experts. Each reads only its part, and
            all ranks must call this function.
        options: further arguments of ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        DependencyError: ``quantization`` is set and bitsandbytes is not installed.
        RecipeError: an unknown ``quantization``, or an option that it cannot be combined with.
        CheckpointError: files are missing, damaged or do not fit the config; no weight is ever left
            at random values.
        UnsupportedModelError: see :func:`load_config`.
    """
    if options.pop("trust_remote_code", False):
        raise UnsupportedModelError(
            "trust_remote_code: code from a checkpoint is never executed; every supported "
            "family has a class here or in transformers; leave the option out"
        )
    from moe_finetune.quantization.codec import check_kind

    kind = check_kind(quantization)
    check_attention(options.get("attn_implementation"))
    opened = source if isinstance(source, Checkpoint) else local_folder(source)
    checkpoint = open_checkpoint(opened, values=True, stored=True)
    if kind is not None or checkpoint.quantized is not None:
        from moe_finetune.checkpoint.load_quantized import load_quantized

        model = load_quantized(checkpoint, kind, dtype, device_map, expert_ranks, **options)
    else:
        config = copy.deepcopy(checkpoint.model_config)
        options |= {"dtype": dtype, "device_map": device_map}
        model = read_weights(checkpoint.folder, config, expert_ranks, **options)
    return opened_as(checkpoint.family, model)


def forget_generation_defaults(model: Any, pad_token_id: int | None) -> None:
    """Reset a checkpoint's penalties and sampling for ``generate``; its end tokens stay."""
    from transformers import GenerationConfig

    stored = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=stored.eos_token_id,
        bos_token_id=stored.bos_token_id,
        pad_token_id=pad_token_id,
    )


def read_weights(
    folder: Path, config: PreTrainedConfig, expert_ranks: int = 1, **options: Any
) -> Any:
    """Load the causal language model of ``config`` from a checked folder; no weight stays random.

    Raises:
        CheckpointError: tensors are missing or do not fit the config.
    """
    read = class_of(config).from_pretrained
    if expert_ranks > 1:
        from moe_finetune.moe.spread_loading import load_spread

        read = partial(load_spread, type(meta_model(config)), expert_ranks)
    try:
        loaded: Any = read(
            folder,
            config=config,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{folder}: the tensors do not fit config.json: {error}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors that config.json describes are missing, the first "
            f"is '{missing[0]}'; copy the checkpoint again"
        )
    return model


def check_attention(name: str | None) -> None:
    """Refuse an attention kernel that transformers would fetch from the hub.

    Raises:
        RecipeError: the name is unknown.
        DependencyError: the name is a flash attention kernel whose package is not installed.
    """
    check_kernel(name, "attn_implementation", RecipeError)
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if name in package and find_spec(package[name]) is None:
        raise DependencyError(
            f"attn_implementation {name}: the package {package[name]} is not installed, and its "
            "kernel is never downloaded from the hub; install it, or use sdpa"
        )
