"""What an adapter's own tensors say, read for verification without the code that merges read by.

Here are the names of transformers 4 and, for one matrix at a time, the makers' packings of stacks.

Shape legend: n experts with factors, r rank, O rows and I columns of a matrix.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.factor_layout import made_by_megatron_bridge
from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.peft_model import LoraModule
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import VerificationError

_TOLERANCE = 1e-5
_PARTS = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj": ("gate_proj", "x_proj"),
}
"""Projections of which Tinker trains the parts, in the order of their rows.

Written here again: what checks a form must not read that form's own table.
"""


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
    """Check what PEFT's ``modules`` change in one layer, with the factors that ``form`` gives.

    Of projections that the file has in parts, one is checked too.
    """
    stacks = [m for m in modules if getattr(m.module, "num_experts", 1) > 1]
    layer = (stacks or modules)[0].loaded.rpartition(".")[0]
    checked = [m for m in modules if m.loaded.startswith(f"{layer}.")]
    in_parts = (m for m in modules if m not in checked and _parts(stored, m))
    for module in (*checked, *list(in_parts)[:1]):
        key, (*_, rows, columns) = _key(stored, base, module), base.names.shapes[module.loaded]
        if key is None:
            stated_in_parts = _of_projections if module in stacks else _of_parts
            changes_OI = stated_in_parts(stored, module, (rows, columns))
        else:
            stated = _of_stack if module in stacks else _of_matrix
            changes_OI = stated(stored, key, module, (rows, columns))
        for by_peft_OI, by_hand_OI in zip(module.deltas(form), changes_OI, strict=True):
            if float((by_peft_OI - by_hand_OI).norm()) > _TOLERANCE * float(by_hand_OI.norm()):
                raise VerificationError(
                    f"{stored.folder}: '{key or layer}' says another change of '{module.loaded}' "
                    "than PEFT makes of it; report this as a bug"
                )


def _key(stored: Adapter, base: Checkpoint, module: LoraModule) -> str | None:
    """The key of the module's first factor, under the model's name or that of the files.

    None if its projections have names of their own.
    """
    ndim = len(base.names.shapes[module.loaded])
    files = [
        name.removesuffix(".weight")
        for name in base.names.files[module.loaded]
        if len(base.tensors[name].shape) == ndim  # one expert's own matrix is no stack
    ]
    ends = (".lora_A.weight", ".lora_embedding_A")
    paths = (module.path, *files, _tinker_path(module.path))
    keys = (p + e for p in paths for e in ends)
    return next((key for key in keys if key in stored.tensors), None)


def _tinker_path(path: str) -> str:
    if path == "lm_head":
        return "model.unembed_tokens"
    return path.replace(".language_model.", ".").replace(".self_attn.", ".attn.")


def _parts(stored: Adapter, module: LoraModule) -> list[str]:
    """The keys of A of a projection that the file has in parts, in the order of its rows."""
    heads = {path.rpartition(".")[0] for path in (module.path, _tinker_path(module.path))}
    return [
        key
        for head in heads
        for part in _PARTS.get(module.path.rpartition(".")[2], ())
        if (key := f"{head}.{part}.lora_A.weight") in stored.tensors
    ]


def _of_parts(stored: Adapter, module: LoraModule, shape: tuple[int, int]) -> Iterator[Tensor]:
    change_OI, first = torch.zeros(shape), 0
    for key in _parts(stored, module):
        part_OI = _product(stored, key)
        scale = _scale(stored.config, key.partition(".lora_")[0], stored.tensors[key].shape)
        change_OI[first : first + len(part_OI)] = scale * part_OI
        first += len(part_OI)
    yield change_OI


def _of_matrix(stored: Adapter, key: str, module: LoraModule, _: Any) -> Iterator[Tensor]:
    yield _product(stored, key) * float(module.module.scaling["default"])


def _of_stack(
    stored: Adapter, key: str, module: LoraModule, shape: tuple[int, int]
) -> Iterator[Tensor]:
    config, chosen = stored.config, stored.metadata.experts
    ids = list(range(module.module.num_experts))
    version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or "0.17"))
    old = chosen is None and version is not None and (int(version[1]), int(version[2])) < (0, 19)
    turned = old or getattr(module.module.get_base_layer(), "is_transposed", False)
    if chosen is not None:
        ids = list(chosen[int(key.split(".layers.")[1].split(".")[0])])
    a, b = _pair(stored, key)
    for expert in range(module.module.num_experts):
        if expert not in ids:
            yield torch.zeros(shape)
            continue
        n, slot = len(ids), ids.index(expert)
        b_Yr = b.chunk(n, 1)[slot] if _grouped(config, module) else b[:, slot::n]
        change_YX = b_Yr @ a.chunk(n)[slot] * float(module.module.scaling["default"])
        square = shape[0] == shape[1]
        yield change_YX.T if change_YX.shape != shape or (square and turned) else change_YX


def _of_projections(
    stored: Adapter, module: LoraModule, shape: tuple[int, int]
) -> Iterator[Tensor]:
    """The changes of a stack whose projections have names of their own, one expert at a time."""
    experts, config = module.module.get_base_layer(), stored.config
    layer = module.loaded.split(".layers.")[1].split(".")[0]
    named = {
        key.split("experts.", 1)[1]: info
        for key, info in stored.tensors.items()
        if f".layers.{layer}." in key and ".experts." in key
    }
    turned = getattr(experts, "is_transposed", False)
    rows, columns = shape[::-1] if turned else shape
    fused, half = module.loaded.endswith("gate_up_proj"), rows // 2
    apart = not getattr(experts, "is_concatenated", True)
    gate, up = (range(0, rows, 2), range(1, rows, 2)) if apart else (range(half), range(half, rows))
    places: dict[str, list[int]] = {"w2": [], "down_proj": [], "down": []}
    if not module.loaded.endswith("down_proj"):
        places = {"w1": [*gate] if fused else [], "gate_proj": [*gate], "w3": [*up]}
        places |= {"up_proj": [*up] if fused else [], "gate_up_proj": [], "gate_and_up": []}
        if apart and config.get("gate_up_rows") == "halves":
            places["gate_up_proj"] = places["gate_and_up"] = [*gate, *up]
    for expert in range(module.module.num_experts):
        change_OI = torch.zeros(rows, columns)
        for name, at in places.items():
            a_rI, b_Or = (_factor(named, expert, name, side) for side in "AB")
            if a_rI is None or b_Or is None:
                continue
            scale = config["lora_alpha"] / len(a_rI)
            if config.get("use_rslora"):
                scale = config["lora_alpha"] / math.sqrt(len(a_rI))
            change_OI[at or range(rows)] += scale * b_Or @ a_rI
        yield change_OI.T if turned else change_OI


def _factor(named: dict[str, Any], expert: int, name: str, side: str) -> Tensor | None:
    """A or B of one projection of one expert: A (r, I), B (O, r)."""
    for key in (f"{expert}.{name}.lora_{side}.weight", f"{name}s.{expert}.lora_{side}.weight"):
        if key in named:
            return read_tensor(named[key]).float()
    if (key := f"lora_{name}_{side}") in named:
        return read_tensor(named[key])[expert].T.float()
    if (key := f"{name}.lora_{side}.weight") not in named:
        return None
    value = read_tensor(named[key]).float()
    if value.ndim == 2 or not value.numel():
        return value if value.numel() else None
    return value[0] if len(value) == 1 else value[expert]


def _grouped(config: dict[str, Any], module: LoraModule) -> bool:
    if "lora_B_layout" not in config and made_by_megatron_bridge(config):
        return True
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
