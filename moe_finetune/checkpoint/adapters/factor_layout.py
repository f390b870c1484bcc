"""How the LoRA factors of an expert stack are packed; this depends on the tool that wrote them.

PEFT, and so axolotl, LLaMA-Factory and TRL: the expert varies slowest in ``lora_A`` and fastest in
``lora_B``. Three other packings have the same shapes or names:

- before PEFT 0.19, ``lora_A`` has the outputs and ``lora_B`` the inputs of each matrix;
- Unsloth, until September 2026, packed ``lora_B`` expert by expert. Later releases record the
  packing, as ``lora_B_layout`` and by parameter in ``unsloth_fused_expert_lora``;
- Megatron-Bridge does both: the outputs in ``lora_A``, and ``lora_B`` expert by expert.

Shape legend: E experts, n those with factors, r rank, Z inputs or outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import AdapterError

if TYPE_CHECKING:
    from torch import Tensor

    from moe_finetune.checkpoint.adapters.files import Adapter
    from moe_finetune.checkpoint.open import Checkpoint

MARKER = "lora_B_layout"
DETAIL = "unsloth_fused_expert_lora"
RANK_MAJOR, GROUPED = "rank_major", "grouped_by_expert"
_MEGATRON_BRIDGE = frozenset({
    "peft_type", "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "lora_alpha", "lora_dropout", "modules_to_save", "r",
    "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "task_type", "use_dora",
    "use_rslora",
})  # fmt: skip
"""All keys of the config that it writes with packed stacks; PEFT's own has about forty."""
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of an expert's matrices in transformers 4, and of shared experts' and dense layers'."""
OLD_EXPERT = re.compile(r".*\.layers\.\d+\..*\.experts\.\d+\..*")
"""Keys of adapters that were saved when PEFT wrapped each expert's own matrices."""


def vectors_of_a(a_nrZ: Tensor, experts: int) -> Tensor:
    """``lora_A`` (n·r, Z) as (n, r, Z)."""
    return a_nrZ.unflatten(0, (experts, -1))


def vectors_of_b(b_Zrn: Tensor, experts: int, grouped: bool = False) -> Tensor:
    """``lora_B`` (Z, r·n), or with ``grouped`` (Z, n·r), as (n, r, Z)."""
    if grouped:
        return b_Zrn.unflatten(1, (experts, -1)).permute(1, 2, 0)
    return b_Zrn.unflatten(1, (-1, experts)).permute(2, 1, 0)


def as_a(vectors_ErZ: Tensor) -> Tensor:
    """The vectors as PEFT packs them in ``lora_A``."""
    return vectors_ErZ.flatten(0, 1).contiguous()


def as_b(vectors_ErZ: Tensor) -> Tensor:
    """The vectors as PEFT packs them in ``lora_B``."""
    return vectors_ErZ.permute(2, 1, 0).flatten(1)


def of_all_experts(vectors_nrZ: Tensor, chosen: Sequence[int], total: int) -> Tensor:
    """The vectors of the ``chosen`` experts, and zeros for the others."""
    vectors_ErZ = vectors_nrZ.new_zeros(total, *vectors_nrZ.shape[1:])
    vectors_ErZ[list(chosen)] = vectors_nrZ
    return vectors_ErZ


def grouped_by_expert(
    config: Mapping[str, Any], parameter: str, swapped: bool, location: Path
) -> bool:
    """Whether ``lora_B`` of the stack ``parameter`` has each expert's columns side by side.

    ``swapped``: whether ``lora_A`` has the outputs.
    """
    layout = config.get(MARKER)
    detail = config.get(DETAIL)
    parameters = detail.get("parameters") if isinstance(detail, dict) else None
    if isinstance(parameters, dict):
        for name, facts in parameters.items():
            if name.rpartition(".")[2] == parameter and isinstance(facts, dict):
                layout = facts.get(MARKER, layout)
    if layout in (RANK_MAJOR, GROUPED):
        return layout == GROUPED
    if layout is not None:
        raise AdapterError(
            f"{location}: {MARKER} is {layout!r:.60}; it must be {RANK_MAJOR} or {GROUPED}"
        )
    if made_by_unsloth(config):
        raise AdapterError(
            f"{location}: Unsloth made this adapter. Its releases before September 2026 pack the "
            f"experts' lora_B by expert, later ones as PEFT does, and the file does not say which. "
            f'Add "{MARKER}": "{GROUPED}" to the file if it was trained before, '
            f'"{MARKER}": "{RANK_MAJOR}" if it was trained with a later release'
        )
    if made_by_megatron_bridge(config):
        if swapped:
            return True
        raise AdapterError(
            f"{location}: Megatron-Bridge made this adapter, in another packing than its releases "
            f'until August 2026, and the file does not say which. Add "{MARKER}": "{RANK_MAJOR}" '
            f'to the file if PEFT loads it and computes the same, "{MARKER}": "{GROUPED}" if '
            "lora_B is packed by expert"
        )
    return False


def made_by_megatron_bridge(config: Mapping[str, Any]) -> bool:
    """Return whether the config has the keys of Megatron-Bridge's, all of them and no other.

    The version of PEFT may have been added since, to tell inputs from outputs in square matrices.
    """
    return config.keys() - {"peft_version"} == _MEGATRON_BRIDGE


def made_by_unsloth(config: Mapping[str, Any]) -> bool:
    """Return whether the config has keys that only Unsloth writes."""
    mapping = config.get("auto_mapping")
    return DETAIL in config or (isinstance(mapping, dict) and "unsloth_fixed" in mapping)


def before_019(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT before 0.19 saved the adapter; 0.17 does not write its version."""
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or "0.0"))
    return version is not None and (int(version[1]), int(version[2])) < (0, 19)


def outputs_first(
    config: Mapping[str, Any],
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    out_size: int,
    in_size: int,
    location: Path,
) -> bool:
    """Whether ``lora_A`` of a stack (E, O, I) has the outputs, as before PEFT 0.19.

    The shapes decide unless the matrix is square; then the writing PEFT's version does.
    """
    if out_size != in_size:
        return (a_shape[-1], b_shape[0]) == (out_size, in_size)
    if not re.match(r"\d+\.\d+", str(config.get("peft_version") or "")):
        raise AdapterError(
            f"{location}: the experts' matrices are square, and peft_version is missing, so "
            "lora_A may apply to their inputs or their outputs. Add the version of PEFT that "
            'saved the adapter, such as "peft_version": "0.18.1"'
        )
    return before_019(config)


def lacks_experts(adapter: Adapter, base: Checkpoint) -> bool:
    """Whether what was saved is complete without routed experts, though today's PEFT adds them.

    It takes ``gate_proj`` and the like for the stacks of transformers 5, where PEFT before 0.19
    matched nothing, and PEFT 0.21 also takes those of shared experts that a path or a regular
    expression names.
    """
    stack = f".{base.places.experts_path}."
    parameters = [f"{stack}{name}" for name in base.places.expert_parameters]
    targets, modules = (adapter.config.get(f"target_{k}") or () for k in ("parameters", "modules"))
    translated = isinstance(modules, str) or any(_end_of(m) in OF_EXPERTS for m in modules)
    return (
        adapter.metadata.experts is None
        and translated
        and not any(stack in key for key in adapter.tensors)
        and not any(p.endswith(f".{target}") for p in parameters for target in targets)
        and (before_019(adapter.config) or not names_experts(adapter, base))
    )


def names_experts(adapter: Adapter, base: Checkpoint) -> bool:
    """Whether ``target_modules`` names a routed expert's matrix, as transformers 4 has it."""
    modules, places = adapter.config.get("target_modules") or (), base.places
    if modules == "all-linear":
        return True
    paths = []
    for layer in places.moe_layers:
        stack = f"{places.backbone}.layers.{layer}.{places.experts_path}"
        paths += [f"{stack}.0.{name}" for name in OF_EXPERTS]
        for parameter in places.expert_parameters:
            paths += [n.removesuffix(".weight") for n in base.names.files[f"{stack}.{parameter}"]]
    if isinstance(modules, str):
        return any(map(re.compile(modules).fullmatch, paths))
    return any(f".{path}".endswith(f".{module}") for path in paths for module in modules)


def _end_of(path: str) -> str:
    return path.rpartition(".")[2]


def names_files(adapter: Adapter, base: Checkpoint) -> bool:
    """Whether the keys name tensors of the files, as with transformers 4.

    That is, each expert's own matrices, a stack with factors under its name there (GraniteMoE), or
    a tensor that the class calls otherwise.
    """
    if any(map(OLD_EXPERT.fullmatch, adapter.tensors)):
        return True
    pairs = {key.replace(".base_layer", "").partition(".lora_")[:2] for key in adapter.tensors}
    adapted = {f"{path}.weight" for path, lora in pairs if lora} & base.tensors.keys()
    in_files = adapted | {path for path, lora in pairs if not lora} & base.tensors.keys()
    stacks = (len(base.tensors[name].shape) == 3 for name in adapted)
    return any(stacks) or not in_files <= base.names.shapes.keys()
