"""How an adapter packs the LoRA factors of an expert stack; this depends on the tool that wrote it.

In PEFT's packing the expert index varies slowest in ``lora_A`` and fastest in ``lora_B``. axolotl,
LLaMA-Factory and TRL save through PEFT and have the same packing. Two other packings have the same
shapes or names:

- before PEFT 0.19, ``lora_A`` has the outputs and ``lora_B`` the inputs of each matrix;
- Unsloth, until September 2026, packed ``lora_B`` expert by expert. Later releases record their
  packing in ``adapter_config.json``, as ``lora_B_layout`` and by parameter in
  ``unsloth_fused_expert_lora``. Older files only show that Unsloth wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import AdapterError

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapter import Adapter
    from moe_finetune.checkpoint.open import Checkpoint

MARKER = "lora_B_layout"
DETAIL = "unsloth_fused_expert_lora"
RANK_MAJOR, GROUPED = "rank_major", "grouped_by_expert"
OLD_EXPERT = re.compile(r".*\.layers\.\d+\..*\.experts\.\d+\..*")
"""Keys of adapters that were saved when PEFT wrapped each expert's own matrices."""


def grouped_by_expert(config: Mapping[str, Any], parameter: str, location: Path) -> bool:
    """Return whether ``lora_B`` of a stack has each expert's columns side by side.

    Args:
        config: ``adapter_config.json``.
        parameter: name in the experts module, such as ``gate_up_proj``.
        location: the path at the start of an error message.
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
    return False


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
    """Return whether ``lora_A`` of a stack (E, O, I) has the outputs, as before PEFT 0.19.

    The shapes decide unless the matrix is square; then the PEFT version that wrote the file does.
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
    """Return whether PEFT before 0.19 found no experts by their names in ``target_modules``.

    With transformers 5 ``gate_proj`` and the like then matched nothing in the stacks; today's PEFT
    translates the names. What was trained and saved is complete without the experts.
    """
    stack = f".{base.family.experts_path}."
    parameters = [f"{stack}{name}" for name in base.family.expert_parameters]
    targets, modules = (adapter.config.get(f"target_{k}") or () for k in ("parameters", "modules"))
    names = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # of transformers 4
    return (
        adapter.metadata.experts is None
        and before_019(adapter.config)
        and not any(stack in key for key in adapter.tensors)
        and not any(p.endswith(f".{target}") for p in parameters for target in targets)
        and (isinstance(modules, str) or any(m.rpartition(".")[2] in names for m in modules))
    )


def names_files(adapter: Adapter, base: Checkpoint) -> bool:
    """Return whether the adapter's keys name the tensors of the files, as with transformers 4.

    It has factors for each expert's own matrices, or for a stack under its name in the files, as
    GraniteMoE's were parameters that PEFT could adapt.
    """
    if any(map(OLD_EXPERT.fullmatch, adapter.tensors)):
        return True
    paths = {key.partition(".lora_")[0] for key in adapter.tensors if ".lora_" in key}
    stored = (base.tensors.get(f"{path}.weight") for path in paths)
    return any(info is not None and len(info.shape) == 3 for info in stored)
