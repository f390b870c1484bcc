"""Check an adapter: its content, and that it belongs to its base.

:func:`moe_finetune.checkpoint.opened.open_checkpoint` checks the base. Every command that takes an
adapter runs both before it builds or writes anything.
"""

import logging
import re
from pathlib import Path

from moe_finetune.checkpoint.adapter import (
    CONFIG,
    PREFIX,
    Adapter,
    check_finite,
    open_adapter,
    read_bias,
)
from moe_finetune.checkpoint.adapter_layout import (
    OLD_EXPERT,
    lacks_experts,
    names_experts,
    stacks_of_files,
)
from moe_finetune.checkpoint.adapter_metadata import METADATA
from moe_finetune.checkpoint.bias import check_bias
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.names import on_meta
from moe_finetune.checkpoint.peft_model import wrap
from moe_finetune.checkpoint.resolve import resolve
from moe_finetune.checkpoint.tensors import read_tensor
from moe_finetune.checkpoint.values import check_values, fingerprint
from moe_finetune.errors import AdapterError, CheckpointError, did_you_mean
from moe_finetune.io.checkpoint_files import tensors_of
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.models.structure import renamed_as_loaded

log = logging.getLogger(__name__)
_warned: set[Path] = set()
BASE_KEY = "base_sha256"
"""Key of ``moe_finetune.json``: the fingerprint of the base's tensors."""
STORED_KEY = "stored_base_sha256"
"""The same for a quantized base; the adapter may also be merged into the unquantized one."""
# A router's buffer is saved only where the router trains.
_MAY_LACK = "e_score_correction_bias"
# PEFT also saves these where the vocabulary has grown or LoRA is on one of them.
_MAY_ADD = (
    "embed_tokens.weight",
    "embed_tokens.base_layer.weight",
    "lm_head.weight",
    "lm_head.base_layer.weight",
    _MAY_LACK,
)


def check_adapter(path: str | Path, base: Checkpoint) -> Adapter:
    """Open an adapter to use unmerged with ``base``, with all checks of a merge.

    Raises:
        AdapterError: see :func:`check_belongs` and :func:`moe_finetune.checkpoint.resolve.resolve`.
        CheckpointError: a bias is for a layer without experts, or has the wrong length.
    """
    adapter = open_adapter(path)
    resolve(adapter, base)
    check_bias(base, read_bias(adapter.folder) or {})
    check_belongs(adapter, base)
    return adapter


def check_belongs(adapter: Adapter, base: Checkpoint) -> None:
    """Check that ``adapter``, whose tensors fit ``base``, is complete, finite, and made for it.

    Raises:
        AdapterError: names the tensor that is missing or not finite, or both bases' fingerprints.
    """
    _check_complete(adapter, base)
    _check_tables(adapter, base)
    _check_base(adapter, base)
    check_finite(adapter)


def _check_base(adapter: Adapter, base: Checkpoint) -> None:
    key, tensors = named_tensors(base)
    recorded = adapter.metadata.extra.get(key)
    if recorded is None:
        folder = (
            adapter.folder.absolute()
        )  # another machine may have a different folder by this name
        if folder in _warned:
            return
        _warned.add(folder)
        log.warning(
            "%s: does not record its base (%s of %s), so only its shapes can be checked against %s",
            adapter.folder,
            key,
            METADATA,
            base.folder,
        )
        return
    actual = fingerprint(tensors)
    if recorded != actual:
        # A base damaged since training also differs; its damaged tensor is then the better message.
        check_values(tensors, CheckpointError, "copy the checkpoint again")
        raise AdapterError(
            f"{adapter.folder}: was trained on another base: the tensors of {base.folder} have "
            f"the fingerprint {actual[:12]}, {METADATA} names {str(recorded)[:12]}; give the base "
            "that it was trained on (merge: --base)"
        )


def named_tensors(base: Checkpoint) -> tuple[str, list[TensorInfo]]:
    """The key of the base's fingerprint in ``moe_finetune.json``, and the tensors it covers."""
    if base.quantized is None:
        return BASE_KEY, list(base.tensors.values())
    return STORED_KEY, list(tensors_of(base.files).values())


def _check_tables(adapter: Adapter, base: Checkpoint) -> None:
    """Check that integer tensors of a saved module equal the base's, which a merge keeps."""
    for key, info in adapter.tables.items():
        name = base.name_in_files(key)
        table = base.tensors.get(name)
        if (
            table is None
            or table.shape != info.shape
            or (read_tensor(table) != read_tensor(info)).any()
        ):
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' differs from the base's '{name}'; the "
                "adapter was trained on another base"
            )


def _check_complete(adapter: Adapter, base: Checkpoint) -> None:
    """Check for all keys that PEFT would save for this config and model.

    PEFT itself loads an incomplete adapter without an error.
    """
    old = any(map(OLD_EXPERT.fullmatch, adapter.tensors)) or stacks_of_files(adapter, base)
    family, selection = base.family, adapter.metadata.experts
    without_experts = lacks_experts(adapter, base) and names_experts(adapter)
    _check_biases(adapter)
    if old or without_experts:
        expected = _old_keys(adapter, base, as_loaded=without_experts)
    else:
        expected = _peft_keys(adapter, base)
    stored = adapter.tensors.keys() | adapter.tables.keys()
    extra = sorted(key for key in stored - expected if not key.endswith(_MAY_ADD))
    stack = f".{family.experts_path}."
    for key in sorted(expected - stored):
        layer = key.partition(stack)[0].rpartition(".")[2]
        unselected = selection is not None and stack in key and int(layer) not in selection
        of_experts = stack in key or OLD_EXPERT.fullmatch(key) is not None
        left_out = unselected or (without_experts and of_experts)
        if not left_out and not key.endswith(_MAY_LACK):
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' is missing, which {CONFIG} "
                f"requires{did_you_mean(key, extra) if extra else '; copy the adapter again'}"
            )
    if extra:
        raise AdapterError(
            f"{adapter.folder}: adapter tensor '{extra[0]}' is not among those that {CONFIG} "
            f"describes ({len(extra)} such tensors); use the config of this adapter"
        )


def _check_biases(adapter: Adapter) -> None:
    """Refuse biases that trained and were not saved: PEFT forgets those of ``lora_only``."""
    if adapter.config.get("bias") != "lora_only":
        return
    if not any(key.endswith(".bias") for key in adapter.tensors):
        raise AdapterError(
            f"{adapter.folder / CONFIG}: bias is 'lora_only', but PEFT did not save the biases "
            "that trained, and without them the adapter computes something else. Train with bias "
            "'none' or 'all'; if the biases never changed, set \"bias\": \"none\" in the file"
        )


def _old_keys(adapter: Adapter, base: Checkpoint, as_loaded: bool) -> set[str]:
    """All keys of an adapter for unfused experts, with one module per matrix as in the files.

    PEFT then wrapped the matrices of every targeted expert: all, or those named in the config.
    With ``as_loaded`` modules have the names of transformers 5.
    """
    config, stack = adapter.config, base.family.disk.stack
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    factors = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    keys: set[str] = set()
    try:
        for name, info in base.tensors.items():
            if as_loaded:
                name = renamed_as_loaded(base.model_config, name)
            module = name.rpartition(".")[0]
            if _matches(config.get("modules_to_save"), module):
                keys.add(name)
            layer = module.removeprefix(stack).partition(".")[0]
            inside = layers is None or (layer.isdigit() and int(layer) in layers)
            linear = name.endswith(".weight") and len(info.shape) == 2
            targeted = _matches(config.get("target_modules"), module)
            excluded = _matches(config.get("exclude_modules"), module)
            if linear and inside and targeted and not excluded:
                keys |= {f"{module}.{f}" for f in factors[: 3 if config.get("use_dora") else 2]}
            if len(info.shape) == 3 and inside and adapter.targets_parameter(name):
                keys |= {f"{module}.{f}" for f in factors[:2]}
    except (re.error, TypeError) as error:
        raise AdapterError(
            f"{adapter.folder / CONFIG}: its modules must be names or a regular expression "
            f"({error})"
        ) from None
    return keys


def _matches(targets: list[str] | str | None, module: str) -> bool:
    """PEFT's rule for ``target_modules`` and similar keys: suffixes, or a regular expression."""
    if targets == "all-linear":
        return not module.endswith(("lm_head", "embed_tokens"))
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets or ())


def _peft_keys(adapter: Adapter, base: Checkpoint) -> set[str]:
    """Keys that PEFT would save for the adapter's config and the base's model."""
    import torch
    from peft import get_peft_model_state_dict

    with torch.device("meta"):
        wrapped = wrap(on_meta(base.model_config), adapter)
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return {key.removeprefix(PREFIX) for key in state}
