"""Factors under each expert's name over a class with stacks, and others that all experts share.

Of shared-outer LoRA, Megatron-Bridge exports and SGLang reads the shared factor once,
``experts.gate_proj.lora_A.weight`` (1, r, I), the same under ``up_proj``; the other one under each
expert's name, ``experts.3.gate_proj.lora_B.weight`` (O, r). Names are those of the base's files.
Read in Megatron-Bridge (``conversion/peft_bridge.py``).

Unsloth's 4-bit gpt-oss has a list of modules for each projection,
``experts.gate_up_projs.3.lora_A.weight`` (r, I), whose rows are in the model's order. Read in
unsloth-zoo (``temporary_patches/gpt_oss.py``).
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.forms.class_stacks import (
    GATE_UP_ROWS,
    ClassExperts,
    Place,
    Sides,
    Vectors,
    in_class,
    read_projections,
)
from moe_finetune.checkpoint.adapters.forms.expert_keys import ExpertKey, expert_keys
from moe_finetune.checkpoint.adapters.forms.form import Form
from moe_finetune.checkpoint.adapters.forms.stack_config import check_one_pattern
from moe_finetune.checkpoint.adapters.forms.stacked import role_of, vectors_of
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError


def read(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` with PEFT's stacks in place of its projections."""
    experts = ClassExperts(base)
    sides = Sides(stored)
    keys = expert_keys(stored)
    single: dict[Place, dict[int, ExpertKey]] = {}
    for key in keys:
        place = key.layer, role_of(stored, experts, key), key.side
        if key.expert is None:
            sides[place] = vectors_of(stored, key, stored.tensors[key.key])
            continue
        other = single.setdefault(place, {}).setdefault(key.expert, key)
        if other is not key:
            raise AdapterError(
                f"{stored.folder}: adapter tensor '{key.key}': the file also has '{other.key}' for "
                "the same projection; use one of them"
            )
    for place, of_experts in single.items():
        sides[place] = _stacked(stored, experts.total, of_experts)
    used = [key.key for key in keys]
    return in_class(stored, experts, read_projections(stored, experts, sides), used)


def read_lists(stored: Adapter, base: Checkpoint) -> Adapter:
    """The same for Unsloth's lists, whose rows of gate and up alternate where the class's do."""
    return read(replace(stored, config={GATE_UP_ROWS: "alternating"} | stored.config), base)


def _stacked(stored: Adapter, total: int, keys: dict[int, ExpertKey]) -> Vectors:
    """The vectors (E, r, Z) of a factor that each expert has under its own name."""
    index, first = next(iter(keys.items()))
    for expert in range(total):
        if expert not in keys:
            name = f".{expert}.".join(first.key.rsplit(f".{index}.", 1))
            raise AdapterError(
                f"{stored.folder}: adapter tensor '{name}' is missing, and other experts have it; "
                "copy the adapter again"
            )
    if max(keys) >= total:
        raise AdapterError(
            f"{stored.folder}: adapter tensor '{keys[max(keys)].key}': the base has {total} "
            "experts; the adapter was trained on another base"
        )
    check_one_pattern(stored, [keys[expert].key for expert in range(total)])
    infos = [stored.tensors[keys[expert].key] for expert in range(total)]
    shape = infos[0].shape
    wrong = next((info for info in infos if info.shape != shape or len(shape) != 2), None)
    if wrong is not None:
        key = next(key.key for key in keys.values() if stored.tensors[key.key] is wrong)
        raise AdapterError(
            f"{stored.folder}: adapter tensor '{key}': shape {list(wrong.shape)}, and that of "
            f"'{keys[0].key}' is {list(shape)}; copy the adapter again"
        )
    rank, size = shape if first.side == "A" else shape[::-1]

    def values() -> Tensor:
        return _in_order(read_tensor(info) for info in infos)

    def turned() -> Tensor:
        return values().mT

    read_as = values if first.side == "A" else turned
    return Vectors(infos[0].name, infos[0].dtype, (total, rank, size), read_as)


def _in_order(matrices: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(matrices))


FORM = Form(
    programs="Megatron-Bridge and SGLang for shared-outer LoRA",
    kinds=frozenset({"stacked", "per-expert"}),
    read=read,
)
LISTS = Form(programs="Unsloth's 4-bit gpt-oss", kinds=frozenset({"listed"}), read=read_lists)
