"""Open a checkpoint folder and check its tensors against its ``config.json``, by the headers.

The expected tensors are those of transformers' class, as its conversions find them in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.untrained import HEAD, layer_of, untrained
from moe_finetune.errors import CheckpointError, UnsupportedModelError, did_you_mean
from moe_finetune.io.checkpoint_files import read_config, read_headers, tensors_of
from moe_finetune.io.config_file import QUANTIZATION, UNQUANTIZED
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo
from moe_finetune.models import Family, check_supported, family_of, find_family
from moe_finetune.models.structure import part_of

if TYPE_CHECKING:
    from moe_finetune.checkpoint.names import Names

RESTORE = "restore the checkpoint's own config.json"


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
    from moe_finetune.checkpoint.names import Names  # needs torch, this file does not
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
    names = Names(parsed, {name: info.shape for name, info in tensors.items()})
    left_out = check_tensors(folder, tensors, names, parsed, family)
    checkpoint = Checkpoint(
        folder, config, parsed, family, files, tensors, names, quantized, left_out
    )
    if values:
        _check_values(in_files)
    return checkpoint


def check_folder(folder: Path, config: Any) -> None:
    """Check tensors and their values before weights are loaded, also of dense models.

    Raises:
        CheckpointError, UnsupportedModelError: see :func:`open_checkpoint`.
    """
    from moe_finetune.checkpoint.names import Names  # needs torch, this file does not

    if find_family(config.model_type, part_of(config)) is not None:
        open_checkpoint(folder, values=True)
        return
    tensors = tensors_of(read_headers(folder))
    check_unpacked(folder, tensors)
    names = Names(config, {name: info.shape for name, info in tensors.items()})
    check_tensors(folder, tensors, names, config)
    _check_values(tensors)


def _check_values(tensors: dict[str, TensorInfo]) -> None:
    from moe_finetune.checkpoint.files import check_values

    check_values(tensors.values(), CheckpointError)


def check_unpacked(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse, by tensor names, a quantized checkpoint whose config does not declare it.

    Raises:
        UnsupportedModelError: names the format.
    """
    for name in tensors:
        stem, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            method = "GPTQ" if f"{stem}.g_idx" in tensors else "AWQ or GPTQ"
        elif leaf == "scales" and f"{stem}.biases" in tensors:
            method = "MLX"
        else:
            continue
        raise UnsupportedModelError(
            f"{folder}: '{name}' is part of a tensor quantized with {method}, which cannot be "
            f"read; {UNQUANTIZED} (for merge: --base FOLDER)"
        )


def check_tensors(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    names: Names,
    config: Any,
    family: Family | None = None,
) -> dict[str, str]:
    """Check that ``tensors`` are exactly those that the model of ``config`` needs.

    Args:
        tensors: the files' tensors by name.
        family: the model's family; None for a dense model.

    Returns:
        the tensors that loaders ignore; see :func:`moe_finetune.checkpoint.untrained.untrained`.

    Raises:
        CheckpointError: names the tensor that is missing, unexpected, of the wrong shape, or of the
            wrong dtype.
    """
    if family is not None:
        experts, chosen = family.num_experts(config), family.top_k(config)
        if not 1 <= chosen <= experts:
            raise CheckpointError(
                f"{folder / 'config.json'}: num_experts_per_tok is {chosen}; expected 1 to "
                f"{experts}"
            )
    needed = names.needed()
    unneeded = {name: names.loaded[name] for name in sorted(tensors.keys() - needed.keys())}
    if getattr(config, "topk_method", None) == "noaux_tc":  # vLLM's class has this bias
        unneeded = {k: v for k, v in unneeded.items() if not k.endswith("e_score_correction_bias")}
    stack = names.stack("model" if family is None else family.backbone)
    left_out = untrained(unneeded, config, stack)
    extra = sorted(unneeded.keys() - left_out.keys())
    layers = config.get_text_config().num_hidden_layers
    found = 1 + max((layer_of(name, stack) or 0 for name in extra), default=0)
    if found > layers:  # transformers drops these without a word
        raise CheckpointError(
            f"{folder / 'config.json'}: num_hidden_layers is {layers}, but the files contain "
            f"{found} layers; {RESTORE}"
        )
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for name in sorted(needed.keys() - tensors.keys()):
        if not (tied and name.endswith(HEAD)):
            raise CheckpointError(
                f"{folder}: tensor '{name}' is missing; the checkpoint is incomplete"
                + (did_you_mean(name, extra) if extra else "; copy the missing shard")
            )
    for name in extra:
        if name.startswith("v_head."):
            raise CheckpointError(
                f"{folder}: '{name}' is the value head of TRL's AutoModelForCausalLMWithValueHead; "
                "the checkpoint next to it is another file: save the model alone, with "
                "model.pretrained_model.save_pretrained(FOLDER)"
            )
        raise CheckpointError(
            f"{folder}: tensor '{name}' in {tensors[name].file.name} does not belong to this "
            f"model ({len(extra)} such tensors); the files and config.json are from different "
            "checkpoints"
        )
    stacks = {t.is_contiguous(): n for n, t in needed.items() if t.ndim == 3 and n in tensors}
    if names.turns and len(stacks) > 1:
        raise CheckpointError(
            f"{folder}: '{stacks[False]}' is stored transposed, (experts, in, out), and "
            f"'{stacks[True]}' is not; loaders would misread one of them; save the checkpoint "
            "again with one layout"
        )
    for name, tensor in needed.items():
        if (info := tensors.get(name)) is not None:
            _check(info, tuple(tensor.shape), tensor.is_floating_point())
    return left_out


def _check(info: TensorInfo, shape: tuple[int, ...], floating: bool) -> None:
    if info.dtype not in (FLOATS if floating else INTEGERS):
        kind = "a float" if floating else "whole numbers"
        raise CheckpointError(
            f"{info.file}: '{info.name}' is stored as {info.dtype}, not as {kind}, but config.json "
            f"has no quantization; {RESTORE}, or use an unquantized checkpoint"
        )
    if info.shape != shape:
        sizes = (
            " (vocab_size, hidden_size)"
            if info.name.endswith(("embed_tokens.weight", HEAD))
            else ""
        )
        raise CheckpointError(
            f"{info.file}: '{info.name}' has shape {list(info.shape)}, but config.json describes "
            f"{list(shape)}{sizes}; {RESTORE} and files"
        )
