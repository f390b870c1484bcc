"""Load the model of a checkpoint, with all of its tensors and without remote code."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.open import Checkpoint, only_weights, open_checkpoint
from moe_finetune.errors import (
    CheckpointError,
    DependencyError,
    RecipeError,
    UnsupportedModelError,
)
from moe_finetune.io.check_config import check_kernel
from moe_finetune.io.terminal import terminal
from moe_finetune.models import opened_as
from moe_finetune.models.class_structure import class_of, meta_model
from moe_finetune.models.config_and_tokenizer import local_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


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
        quantization: "nf4" quantizes experts and linear layers while they are read, one parameter
            at a time. They are frozen and train through an adapter.
        expert_ranks: number of ranks that share the routed experts. Each reads only its part, and
            all ranks must call this function.
        options: further arguments of ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        DependencyError: ``quantization`` is set and bitsandbytes is not installed.
        RecipeError: an unknown ``quantization``, or several devices with it.
        CheckpointError: files are missing, damaged or do not fit the config; no weight is ever left
            at random values.
        UnsupportedModelError: see :func:`load_config`.
    """
    if options.pop("trust_remote_code", False):
        raise UnsupportedModelError(
            "trust_remote_code: code from a checkpoint is never executed; every supported "
            "family has a class here or in transformers; leave the option out"
        )
    import torch

    from moe_finetune.checkpoint.saved_names import keep_names
    from moe_finetune.quantization.codec import check_format

    quantize = check_format(quantization)
    check_attention(options.get("attn_implementation"))
    opened = source if isinstance(source, Checkpoint) else local_folder(source)
    checkpoint = open_checkpoint(opened, values=True, stored=True)
    config, stored = copy.deepcopy(checkpoint.model_config), checkpoint.quantized
    options |= {"dtype": dtype, "device_map": device_map}
    if quantize or stored is not None:
        options["device_map"] = {"": one_device(device_map)}
    if quantize:
        from moe_finetune.moe.large.quantizer import (
            Nf4Config,  # imports many of transformers' modules
        )

        options["quantization_config"] = Nf4Config(checkpoint.family)
    if stored is not None:
        log.warning(
            "%s is stored as %s and is dequantized while it loads", checkpoint.folder, stored.format
        )
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        options["dtype"] = (config.dtype or torch.bfloat16) if dtype == "auto" else dtype
        options["state_dict"] = stored.slices(options["dtype"])
    model = read_weights(checkpoint.folder, config, expert_ranks, **options)
    if not quantize:  # whose parameters are not those of the files
        keep_names(model, checkpoint)
    return opened_as(checkpoint.family, model)


def one_device(device_map: Any) -> torch.device:
    """The device of a quantized model; default: this process's GPU if it has one."""
    import torch

    if isinstance(device_map, dict) and len(set(device_map.values())) == 1:
        device_map = next(iter(device_map.values()))
    if device_map in (None, "auto"):
        gpu = torch.cuda.is_available()
        device_map = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
    if not isinstance(device_map, str | int | torch.device):
        raise RecipeError(
            f"device_map: {device_map!r} spreads the model, but a quantized model must be on one "
            "device"
        )
    return torch.device(device_map)


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
    """Load the causal language model of ``config`` from a checked folder; no weight stays
    random.
    """
    from transformers import GenerationConfig

    read: Any = class_of(config).from_pretrained
    source: Path | None = folder
    if "state_dict" in options:
        read, source = type(meta_model(config)).from_pretrained, None
    if expert_ranks > 1:
        from moe_finetune.moe.large.spread_loading import load_spread

        read = partial(load_spread, type(meta_model(config)), expert_ranks)
    try:
        with without_bar(), only_weights(folder) as weights:
            loaded: Any = read(
                None if source is None else weights,
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
    model.name_or_path = model.config.name_or_path = str(folder)
    if source is None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@contextmanager
def without_bar() -> Iterator[None]:
    """Hide transformers' bar in a command line, which has its own progress."""
    from transformers.utils import logging as bars

    shown = terminal().capture and bars.is_progress_bar_enabled()
    if shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def check_attention(name: str | None) -> None:
    """Refuse an attention kernel that transformers would fetch from the hub."""
    check_kernel(name, "attn_implementation", RecipeError)
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if name in package and find_spec(package[name]) is None:
        raise DependencyError(
            f"attn_implementation {name}: the package {package[name]} is not installed, and its "
            "kernel is never downloaded from the hub; install it, or use sdpa"
        )
