"""Merged tensors of sampled layers against base + PEFT's own delta, for models that do not fit.

PEFT's modules are built without weights; the factors of one module at a time are put into them, so
the mapping from keys to parameters and the unpacking are PEFT's and not the merge's.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CheckpointError
from moe_finetune.weights.adapter import PREFIX, Adapter, open_adapter
from moe_finetune.weights.checkpoint import Checkpoint
from moe_finetune.weights.expand import expand_selection
from moe_finetune.weights.reference import register_classes
from moe_finetune.weights.tensors import read_tensor


def compare_tensors(
    base: Checkpoint,
    adapters: list[tuple[Adapter, float]],
    merged: Checkpoint,
    samples: int,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Base tensor name -> (largest difference, the same over the largest element)."""
    chooser = random.Random(seed)
    deltas: dict[str, Tensor] = {}
    sampled: list[str] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for number, (adapter, weight) in enumerate(adapters):
            opened = adapter
            if adapter.metadata.experts is not None:
                folder = expand_selection(adapter.folder, base.folder, Path(scratch) / str(number))
                opened = open_adapter(folder)
            modules = _peft_modules(base, opened)
            if sampled is None:
                sampled = _spread_sample(sorted(modules), samples, chooser)
            for name in sampled:
                if name in modules:
                    for target, delta in _deltas(base, opened, name, modules[name], chooser):
                        deltas[target] = deltas.get(target, 0) + weight * delta
    errors = {}
    for name, delta in deltas.items():
        wanted = read_tensor(base.tensors[name]).float() + delta
        difference = (read_tensor(merged.tensors[name]).float() - wanted).abs().max().item()
        errors[name] = difference, difference / max(wanted.abs().max().item(), 1e-30)
    if not errors:
        raise CheckpointError("this adapter has no LoRA factors to sample; verify by logits")
    return errors


def _peft_modules(base: Checkpoint, adapter: Adapter) -> dict[str, Any]:
    """PEFT's LoRA modules for ``adapter`` by name, built on the meta device."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoConfig, AutoModelForCausalLM

    register_classes(base)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(base.folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        peft = get_peft_model(model, LoraConfig.from_pretrained(str(adapter.folder)))
    modules = {}
    for name, module in peft.named_modules():
        path = name.removeprefix(PREFIX)
        if isinstance(module, LoraLayer) and f"{path}.lora_A.weight" in adapter.tensors:
            modules[path] = module
    return modules


def _spread_sample(names: list[str], count: int, chooser: random.Random) -> list[str]:
    """``count`` names, one of each kind of module first."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds.setdefault(kind, []).append(name)
    for group in kinds.values():
        chooser.shuffle(group)
    turns = [group[turn] for turn in range(len(names)) for group in kinds.values()
             if turn < len(group)]  # fmt: skip
    return turns[: max(count, len(kinds))]


@torch.no_grad()
def _deltas(
    base: Checkpoint, adapter: Adapter, path: str, module: Any, chooser: random.Random
) -> Iterator[tuple[str, Tensor]]:
    """(base tensor name, PEFT's delta) of one module; two random experts of a fused stack."""
    for factor in ("lora_A", "lora_B"):
        weight = read_tensor(adapter.tensors[f"{path}.{factor}.weight"]).float()
        getattr(module, factor)["default"].weight = torch.nn.Parameter(weight)
    family, parameter = base.family, getattr(module, "parameter_name", None)
    clean = path.replace(".base_layer", "")
    head, found, tail = clean.partition(f".{family.block_path}.")
    if found and tail == family.experts_name:
        layer = int(head.rpartition(".")[2])
        lhs, rhs, scaling = module.get_delta_factors("default")
        for expert in chooser.sample(range(len(lhs)), 2):
            delta = scaling * (lhs[expert] @ rhs[expert])
            if parameter == "gate_up_proj":
                gate, up = delta.chunk(2)
                yield family.disk.name("gate", layer, expert), gate
                yield family.disk.name("up", layer, expert), up
            else:
                yield family.disk.name("down", layer, expert), delta
        return
    name = f"{clean}.weight"
    if found and tail == family.router_name:
        name = family.disk.name("router", int(head.rpartition(".")[2]))
    lora_a, lora_b = (getattr(module, f)["default"].weight for f in ("lora_A", "lora_B"))
    yield name, module.scaling["default"] * (lora_b @ lora_a)
