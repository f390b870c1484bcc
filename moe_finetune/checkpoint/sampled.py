"""Compare sampled merged tensors with base + PEFT's delta, for models too large to load.

PEFT's modules are built without weights; the factors are put into one module at a time. PEFT, not
the merge, thus maps keys to parameters and unpacks the factors.
"""

import copy
import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import PREFIX, Adapter, open_adapter
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.peft_form import peft_folder
from moe_finetune.checkpoint.stored import PlainTensors
from moe_finetune.checkpoint.tensors import read_tensor
from moe_finetune.errors import CheckpointError
from moe_finetune.models.structure import class_of


def compare_tensors(
    base: Checkpoint,
    adapters: list[tuple[Adapter, float]],
    merged: Checkpoint,
    samples: int,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Return for each base tensor (largest difference, that difference over its largest element).

    For a tensor that ``merged`` stores quantized, the second is the norm of the difference over the
    norm of the change.
    """
    deltas: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as scratch:
        parts = []
        for index, (adapter, weight) in enumerate(adapters):
            folder = peft_folder(adapter, base, Path(scratch) / str(index))
            opened = adapter if folder == adapter.folder else open_adapter(folder)
            parts.append((opened, weight, _peft_modules(base, opened)))
        module_names = {name for _, _, modules in parts for name in modules}
        for name in _spread_sample(sorted(module_names), samples, random.Random(seed)):
            for opened, weight, modules in parts:
                if name in modules:
                    for target, delta in _deltas(base, opened, *modules[name], seed):
                        deltas[target] = deltas.get(target, 0) + weight * delta
    errors = {}
    for name, delta in deltas.items():
        expected = _read(base, name) + delta
        error_OI = _read(merged, name) - expected
        difference = error_OI.abs().max().item()
        relative = difference / max(expected.abs().max().item(), 1e-30)
        if (
            merged.quantized is not None
            and len(merged.quantized.stored(name.partition("[")[0])) > 1
        ):
            relative = error_OI.norm().item() / max(delta.norm().item(), 1e-30)
        errors[name] = difference, relative
    if not errors:
        raise CheckpointError("this adapter has no LoRA factors to sample; verify by logits")
    return errors


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor in float32; ``name[expert]`` is one matrix of a stack."""
    name, _, expert = name.partition("[")
    stored = checkpoint.quantized or PlainTensors(checkpoint.tensors)
    if not expert:
        return stored.read(name).float()
    return stored.read_expert(name, int(expert.rstrip("]"))).float()


def _peft_modules(base: Checkpoint, adapter: Adapter) -> dict[str, tuple[str, Any]]:
    """PEFT's LoRA modules on the meta device: adapted parameter -> (path in the keys, module).

    For a saved module the module is None.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    from moe_finetune.moe.lora_factors import quiet_patterns

    config = copy.deepcopy(base.model_config)
    with torch.device("meta"), quiet_patterns():
        model = class_of(config).from_config(config, dtype=torch.float32)
        peft = get_peft_model(model, LoraConfig.from_pretrained(str(adapter.folder)))
    modules: dict[str, tuple[str, Any]] = {}
    for name, module in peft.named_modules():
        path = name.removeprefix(PREFIX)
        if isinstance(module, LoraLayer) and f"{path}.lora_A.weight" in adapter.tensors:
            parameter = getattr(module, "parameter_name", "weight")
            modules[f"{path.replace('.base_layer', '')}.{parameter}"] = (path, module)
    for key in adapter.tensors:
        if ".lora_" not in key and ".base_layer." not in key and ".experts." not in key:
            modules[key] = (key, None)
    return modules


def _spread_sample(names: list[str], count: int, chooser: random.Random) -> list[str]:
    """Choose ``count`` names, first one for each kind of module."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds.setdefault(kind, []).append(name)
    for group in kinds.values():
        chooser.shuffle(group)
    rounds = itertools.zip_longest(*kinds.values())
    turns = [name for turn in rounds for name in turn if name is not None]
    return turns[: max(count, len(kinds))]


@torch.no_grad()
def _deltas(
    base: Checkpoint, adapter: Adapter, path: str, module: Any, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """(base tensor name, PEFT's delta) of one module; for a fused stack, of two experts."""
    family, clean = base.family, path.replace(".base_layer", "")
    if module is None:
        name = base.name_in_files(path)
        saved = read_tensor(adapter.tensors[path]).float()
        yield name, saved - _read(base, name)
        return
    for factor in ("lora_A", "lora_B"):
        weight = read_tensor(adapter.tensors[f"{path}.{factor}.weight"]).float()
        getattr(module, factor)["default"].weight = torch.nn.Parameter(weight)
    head, experts, _ = clean.rpartition(f".{family.experts_path}")
    if not experts or not clean.endswith(experts):
        lora_a, lora_b = (getattr(module, f)["default"].weight for f in ("lora_A", "lora_B"))
        name = base.name_in_files(f"{clean}.weight")
        delta = module.scaling["default"] * (lora_b @ lora_a)
        norms = adapter.tensors.get(f"{path}.lora_magnitude_vector")
        if norms is not None:
            base_value = _read(base, name)
            changed = base_value + delta
            scales = read_tensor(norms).float() / torch.linalg.norm(changed, dim=1)
            delta = scales[:, None] * changed - base_value
        yield name, delta
        return
    layer, parameter = int(head.rpartition(".")[2]), module.parameter_name
    lhs, rhs, scaling = module.get_delta_factors("default")
    # The same two experts for every adapter and parameter, so that their changes can be summed.
    for expert in random.Random(f"{seed} {layer}").sample(range(len(lhs)), 2):
        delta = scaling * (lhs[expert] @ rhs[expert])
        if family.disk.fused:
            (part,) = family.disk.parts(parameter)
            yield f"{family.disk.name(part, layer)}[{expert}]", delta
            continue
        parts = family.disk.parts(parameter)
        for part, half in zip(parts, delta.chunk(len(parts)), strict=True):
            yield family.disk.name(part, layer, expert), half
