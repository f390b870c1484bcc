"""Rewrite an adapter of any origin in the form that the current PEFT reads.

Experts without LoRA get zero factors, factors of single matrices become those of a stack, and other
packings become PEFT's. The weight changes stay the same; ranks and scalings may differ.

Shape legend: E experts, R their rank in the stack, r a matrix's rank, I inputs, O outputs.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import CONFIG, PREFIX, WEIGHTS, Adapter
from moe_finetune.checkpoint.compute import Factors
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.gate import OLD_EXPERT, lacks_experts, stacks_of_files
from moe_finetune.checkpoint.resolve import resolve
from moe_finetune.checkpoint.tensors import read_tensor
from moe_finetune.checkpoint.updates import LowRank
from moe_finetune.errors import AdapterError
from moe_finetune.models.structure import renamed_as_loaded

# PEFT 0.21 treats modules with these names as parts of the expert stacks.
_TAKEN = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_OF_OTHERS = (
    "layers_to_transform", "layers_pattern", "exclude_modules", "lora_B_layout", "peft_version",
    "unsloth_fused_expert_lora", "auto_mapping",
)  # fmt: skip


def peft_folder(adapter: Adapter, base: Checkpoint, output: Path, rewrite: bool = False) -> Path:
    """``adapter``'s own folder if PEFT reads it correctly; else ``output`` with a rewritten one.

    With ``rewrite`` it is always written, and stacks have a scaling of 1.

    Raises:
        AdapterError, CheckpointError: as for a merge, or PEFT has no form for the adapter.
    """
    updates = resolve(adapter, base)
    low_rank = [update for _, update in updates if isinstance(update, LowRank)]
    foreign = lacks_experts(adapter, base) or stacks_of_files(adapter, base)
    if not rewrite and not foreign and ordinary(adapter, low_rank):
        return adapter.folder
    by_tensor: dict[str, list[LowRank]] = {}
    for name, update in updates:
        if isinstance(update, LowRank):
            by_tensor.setdefault(name, []).append(update)
    tensors, ranks, used = _stacks(adapter, base, by_tensor)
    config = base.model_config
    modules: set[str] = set()
    scales = dict.fromkeys(ranks, 1.0)
    of_key = {update.a: update for of_tensor in by_tensor.values() for update in of_tensor}
    for key, info in adapter.tensors.items():
        if key in used:
            continue
        path, _, factor = key.partition(".lora_")
        if not factor:
            tensors[renamed_as_loaded(config, key)] = read_tensor(info)
            continue
        parameter = renamed_as_loaded(config, f"{path}.weight")
        path = parameter.removesuffix(".weight")
        module = path.rpartition(".")[2] not in _TAKEN
        if module:
            modules.add(path)
        if key in of_key:
            target = path if module else parameter
            ranks[target], scales[target] = of_key[key].rank, of_key[key].scale
        tensors[f"{path}.lora_{factor}"] = read_tensor(info)
    parameters = sorted(set(ranks) - modules)
    if adapter.config.get("use_dora") and parameters:
        raise AdapterError(
            f"{adapter.folder}: DoRA on '{parameters[0]}', which PEFT cannot represent on this "
            "model; merge it with 'moe-finetune merge' and use the merged checkpoint"
        )
    root = 0.5 if adapter.config.get("use_rslora") else 1
    changed = {
        **{key: value for key, value in adapter.config.items() if key not in _OF_OTHERS},
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "target_parameters": parameters or None,
        "lora_dropout": 0.0 if parameters else adapter.config.get("lora_dropout") or 0.0,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items()},
        "alpha_pattern": {re.escape(n): scales[n] * float(r) ** root for n, r in ranks.items()},
    }
    return _write(output, changed, tensors)


def ordinary(adapter: Adapter, updates: list[LowRank]) -> bool:
    """Return whether PEFT reads the adapter correctly without a rewrite."""
    return adapter.metadata.experts is None and not any(
        update.grouped or update.outputs_first or OLD_EXPERT.fullmatch(update.a)
        for update in updates
    )


def _stacks(
    adapter: Adapter, base: Checkpoint, by_tensor: Mapping[str, list[LowRank]]
) -> tuple[dict[str, Tensor], dict[str, int], set[str]]:
    """PEFT's factors of all stacks, each stack's rank by its parameter, and the keys used."""
    family, disk = base.family, base.family.disk
    factors = Factors(((adapter, 1.0),))
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    used: set[str] = set()
    # An expert may have several pairs, of single matrices and of stacks. They lie side by side
    # in the stack's one pair, each over the rows of B that belong to its part.
    for layer, experts in base.experts.items():
        path = f"{family.backbone}.layers.{layer}.{family.experts_path}"
        packed: dict[str, tuple[Tensor, Tensor]] = {}
        for parameter in family.expert_parameters:
            # By expert: the first row of B, and the factors; both halves of a pair appear once.
            pairs: dict[int, dict[tuple[str, int], tuple[int, Tensor, Tensor]]] = {}
            rows = 0
            for part in disk.parts(parameter):
                for expert in range(1 if disk.fused else experts):
                    name = disk.name(part, layer, None if disk.fused else expert)
                    for update in by_tensor.get(name, ()):
                        used |= {update.a, update.b}
                        left_Or, right_rI = factors.matrices(update)
                        where = expert if update.expert is None else update.expert
                        first = rows if OLD_EXPERT.fullmatch(update.a) else 0
                        pairs.setdefault(where, {})[update.a, update.slot] = (
                            first, left_Or * update.scale, right_rI,
                        )  # fmt: skip
                if not disk.fused:
                    rows += base.tensors[disk.name(part, layer, 0)].shape[0]
            if pairs:
                out_size = rows or next(iter(next(iter(pairs.values())).values()))[1].shape[0]
                packed[parameter] = _packed(pairs, experts, out_size)
                ranks[f"{path}.{parameter}"] = packed[parameter][0].shape[0] // experts
        for depth, (a, b) in enumerate(reversed(packed.values())):
            key = path + ".base_layer" * depth
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return tensors, ranks, used


def _packed(
    pairs: Mapping[int, Mapping[Any, tuple[int, Tensor, Tensor]]], experts: int, out_size: int
) -> tuple[Tensor, Tensor]:
    """``lora_A`` (E·R, I) and ``lora_B`` (O, R·E) of one stack; a part's factors side by side."""
    rank = max(sum(right.shape[0] for *_, right in factors.values()) for factors in pairs.values())
    in_size = next(iter(next(iter(pairs.values())).values()))[2].shape[1]
    a_ERI, b_EOR = torch.zeros(experts, rank, in_size), torch.zeros(experts, out_size, rank)
    for expert, factors in pairs.items():
        at = 0
        for first, left_Or, right_rI in factors.values():
            columns = slice(at, at + right_rI.shape[0])
            a_ERI[expert, columns] = right_rI
            b_EOR[expert, first : first + left_Or.shape[0], columns] = left_Or
            at = columns.stop
    return a_ERI.flatten(0, 1), b_EOR.permute(1, 2, 0).flatten(1)


def _write(output: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(named, output / WEIGHTS, {"format": "pt"})
    (output / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return output
