"""Open and check a checkpoint folder by its headers."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.contents import Checkpoint, layer_numbers
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import read_config, read_headers, tensors_of
from moe_finetune.io.config_file import QUANTIZATION
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.models import check_supported, family_of, find_family
from moe_finetune.models.composite import language_keys, part_of

_LAYERS = re.compile(r"(.*?\blayers\.)\d+\.")


def open_checkpoint(
    path: str | Path | Checkpoint, values: bool = False, stored: bool = False
) -> Checkpoint:
    """Open and check a folder of safetensors with its ``config.json``, as every command does.

    All tensors that the model needs must be there, in the config's shapes and in float dtypes. The
    only others allowed are those that transformers or the family declares as ignored.

    Args:
        path: the folder, or an open checkpoint, which is returned.
        values: also read every tensor, at the speed of the disk, and refuse NaN and infinity;
            otherwise only headers are read.
        stored: also accept a quantized checkpoint; read its tensors through ``quantized``.

    Raises:
        CheckpointError: the folder is missing, incomplete or damaged, has no safetensors, or does
            not fit its config; the message names the file or tensor.
        UnsupportedModelError: no family supports its ``model_type`` with these options.
    """
    from moe_finetune.checkpoint.fit import as_stored, check_fit, check_unpacked
    from moe_finetune.checkpoint.naming import named_as_in
    from moe_finetune.models.loading import parse_config

    if isinstance(path, Checkpoint):
        if path.quantized is not None and not stored:
            read_config(path.folder)  # which refuses it
        return path
    folder = Path(path)
    config = read_config(folder, quantized=stored)
    form = None
    if config.get(QUANTIZATION) is not None:
        from moe_finetune.quantization.formats import format_of  # needs torch, this file does not

        form = format_of(config, folder / "config.json")
    config.pop(QUANTIZATION, None)
    family = family_of(config)
    files = read_headers(folder)
    in_files = tensors_of(files)
    quantized = None
    if form is None:
        check_unpacked(folder, in_files)
    else:
        from moe_finetune.checkpoint.stored import QuantizedTensors

        quantized = QuantizedTensors(in_files, form)
    tensors = in_files if quantized is None else quantized.tensors
    parsed = parse_config(folder)
    # A bias exported for vLLM's class is valid, although transformers cannot run it.
    if not (family.bias_export == "noaux_tc" and config.get("topk_method") == "noaux_tc"):
        check_supported(parsed, family)
    family = named_as_in(family, parsed, tensors)
    checkpoint = Checkpoint(folder, config, parsed, family, files, tensors, quantized)
    _check_layers(checkpoint)
    checkpoint = as_stored(checkpoint)
    checkpoint = replace(checkpoint, untrained=check_fit(checkpoint))
    if values:
        _check_values(in_files)
    return checkpoint


def check_folder(folder: Path, config: Any) -> None:
    """Check tensors and their values before weights are loaded, also of dense models.

    Raises:
        CheckpointError, UnsupportedModelError: see :func:`open_checkpoint`.
    """
    from moe_finetune.checkpoint.fit import check_tensors, check_unpacked

    if find_family(config.model_type, part_of(config)) is not None:
        open_checkpoint(folder, values=True)
        return
    tensors = tensors_of(read_headers(folder))
    check_unpacked(folder, tensors)
    check_tensors(folder, tensors, config, None)
    _check_values(tensors)


def _check_values(tensors: dict[str, TensorInfo]) -> None:
    from moe_finetune.checkpoint.values import check_values

    check_values(tensors.values(), CheckpointError)


def _check_layers(checkpoint: Checkpoint) -> None:
    layers = set(layer_numbers(checkpoint.tensors, checkpoint.family).values())
    expected = language_keys(checkpoint.config).get("num_hidden_layers")
    missing = sorted(set(range(expected)) - layers) if isinstance(expected, int) else []
    others = Counter(match[1] for name in checkpoint.tensors if (match := _LAYERS.match(name)))
    if missing and not layers - {None} and others:
        raise CheckpointError(
            f"{checkpoint.folder}: its layers are named '{others.most_common(1)[0][0]}N', but "
            f"loaders of model_type '{checkpoint.config['model_type']}' look for "
            f"'{checkpoint.family.disk.stack}N'; use the config.json of this model, or rename "
            "the tensors"
        )
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: no tensor of layer {missing[0]}, but num_hidden_layers in "
            f"config.json is {expected}; copy the missing shard"
        )
