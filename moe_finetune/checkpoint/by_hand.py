"""What an adapter's own tensors say, read for verification without the code that merges read by.

Here are the names of transformers 4 and, for one matrix at a time, the makers' packings of stacks.

Shape legend: n experts with factors, r rank, O rows and I columns of a matrix.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter
from moe_finetune.checkpoint.files import read_tensor
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.peft_model import LoraModule
from moe_finetune.errors import NumericsError

_TOLERANCE = 1e-5


def matrices(stored: Adapter) -> Iterator[tuple[str, Tensor]]:
    """The change of each matrix of the files that has a module of its own, and its name there."""
    for key in stored.tensors:
        path, lora, factor = key.partition(".lora_")
        if lora and factor in ("A.weight", "embedding_A"):
            change = _product(stored, key) * _scale(stored.config, path, stored.tensors[key].shape)
            yield f"{path}.weight", change


def check_layer(
    stored: Adapter, base: Checkpoint, modules: list[LoraModule], form: Adapter
) -> None:
    """Check what PEFT's ``modules`` change in one layer, with the factors that ``form`` gives."""
    stacks = [m for m in modules if getattr(m.module, "num_experts", 1) > 1]
    layer = (stacks or modules)[0].loaded.rpartition(".")[0]
    for module in (m for m in modules if m.loaded.startswith(f"{layer}.")):
        key = _key(stored, base, module)
        for expert, found_OI in enumerate(module.deltas(form)):
            wanted_OI = _by_hand(stored, key, module, expert, found_OI.shape)
            if float((found_OI - wanted_OI).norm()) > _TOLERANCE * float(wanted_OI.norm()):
                raise NumericsError(
                    f"{stored.folder}: '{key}' says another change of '{module.loaded}' than PEFT "
                    "makes of it; report this as a bug"
                )


def _key(stored: Adapter, base: Checkpoint, module: LoraModule) -> str:
    """The key of the module's first factor: under the model's name, or that of the files."""
    files = [name.removesuffix(".weight") for name in base.names.files[module.loaded]]
    ends = (".lora_A.weight", ".lora_embedding_A")
    return next(p + e for p in (module.path, *files) for e in ends if p + e in stored.tensors)


def _by_hand(
    stored: Adapter, key: str, module: LoraModule, expert: int, shape: torch.Size
) -> Tensor:
    scale = float(module.module.scaling["default"])
    experts = getattr(module.module, "num_experts", 1)
    if experts == 1:
        return _product(stored, key) * scale
    ids, config = list(range(experts)), stored.config
    if stored.metadata.experts is not None:
        ids = list(stored.metadata.experts[int(key.split(".layers.")[1].split(".")[0])])
    if expert not in ids:
        return torch.zeros(shape)
    n, slot = len(ids), ids.index(expert)
    a, b = _pair(stored, key)
    a_rX = a.chunk(n)[slot]
    b_Yr = b.chunk(n, 1)[slot] if _grouped(config, module) else b[:, slot::n]
    product_YX = b_Yr @ a_rX
    minor = int(str(config.get("peft_version") or "0.17").split(".")[1])
    turned = getattr(module.module.get_base_layer(), "is_transposed", False)
    turned = turned or (minor < 19 and stored.metadata.experts is None)
    if product_YX.shape != shape or (shape[0] == shape[1] and turned):
        product_YX = product_YX.T
    return product_YX * scale


def _grouped(config: dict[str, Any], module: LoraModule) -> bool:
    of_stacks = (config.get("unsloth_fused_expert_lora") or {}).get("parameters") or {}
    recorded = [facts for name, facts in of_stacks.items() if module.loaded.endswith(name)]
    return next(iter(recorded), config).get("lora_B_layout") == "grouped_by_expert"


def _pair(stored: Adapter, key: str) -> tuple[Tensor, Tensor]:
    a, b = (read_tensor(stored.tensors[k]).float() for k in (key, "B".join(key.rsplit("A", 1))))
    return a, b


def _product(stored: Adapter, key: str) -> Tensor:
    a, b = _pair(stored, key)
    return (b @ a).T if key.endswith("embedding_A") else b @ a


def _scale(config: dict[str, Any], path: str, shape: tuple[int, ...]) -> float:
    from peft.utils.other import get_pattern_key

    alphas: dict[str, float] = config.get("alpha_pattern") or {}
    alpha: float = alphas.get(get_pattern_key(list(alphas), path), config["lora_alpha"])
    return alpha / (math.sqrt(shape[0]) if config.get("use_rslora") else shape[0])
