"""Tinker's own names of modules besides the experts, and the projections that it trains in parts.

It calls the head ``unembed_tokens`` and gpt-oss's attention ``attn``, omits ``language_model``,
and has factors for each part of some projections that transformers' classes fuse. Read in
tinker-cookbook (``weights/_merge_utils.py``, ``_merge_qwen3_5.py``, ``_merge_nemotron.py``).

Shape legend: r rank of a part, R their sum, I inputs, O outputs of the fused projection.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.forms.stack_config import scale_of, tensor_error
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import computed, read_tensor
from moe_finetune.io.safetensors_header import TensorInfo


class _Split(NamedTuple):
    """Parts of a fused projection in the order of its rows; ``complete``: they are all of them."""

    parts: tuple[str, ...]
    complete: bool


_SPLIT = {
    # Qwen3.5's linear attention
    "in_proj_qkv": _Split(("in_proj_q", "in_proj_k", "in_proj_v"), complete=True),
    # Nemotron's Mamba layers; the rows behind, of B, C and the time step, have no factors
    "in_proj": _Split(("gate_proj", "x_proj"), complete=False),
}


def has_tinker_names(stored: Adapter, base: Checkpoint) -> bool:
    """Whether the base knows a module of ``stored`` only by one of Tinker's names for it."""
    paths = _paths(base)
    renamed = any(_renamed(path, paths) != path for path in map(_path_of, stored.tensors))
    return renamed or bool(_split_projections(_under_root(stored, base), paths))


def in_class_names(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` with the class's names and projections where Tinker has its own."""
    paths = _paths(base)
    rooted = _under_root(stored, base)
    tensors = {}
    for key, info in rooted.tensors.items():
        path = _path_of(key)
        tensors[f"{_renamed(path, paths)}{key.removeprefix(path)}"] = info
    return _joined(replace(rooted, tensors=tensors), base, paths)


def _paths(base: Checkpoint) -> set[str]:
    return {name.rpartition(".")[0] for name in base.names.shapes}


def _path_of(key: str) -> str:
    return key.partition(".lora_")[0]


def _under_root(stored: Adapter, base: Checkpoint) -> Adapter:
    backbone = base.places.backbone
    root = backbone.replace(".language_model", "")
    tensors = {
        key.replace(root, backbone, 1) if key.startswith(f"{root}.layers.") else key: info
        for key, info in stored.tensors.items()
    }
    return stored if root == backbone else replace(stored, tensors=tensors)


def _renamed(path: str, paths: Collection[str]) -> str:
    if path.endswith("unembed_tokens"):
        return "lm_head"
    if ".attn." in path and path not in paths:
        return path.replace(".attn.", ".self_attn.", 1)
    return path


def _split_projections(stored: Adapter, paths: Collection[str]) -> dict[str, list[str]]:
    """The paths of the parts of each fused projection of which ``stored`` has at least one."""
    projections = {}
    for path in dict.fromkeys(map(_path_of, stored.tensors)):
        head, _, part = path.rpartition(".")
        for fused, (parts, _) in _SPLIT.items():
            if part in parts and path not in paths and f"{head}.{fused}" in paths:
                projections[f"{head}.{fused}"] = [f"{head}.{name}" for name in parts]
    return projections


def _joined(stored: Adapter, base: Checkpoint, paths: Collection[str]) -> Adapter:
    """``stored`` with one pair of factors in place of those of a projection's parts.

    Its A has those of the parts one below another, its B is block diagonal, and the scaling stays.
    """
    tensors = dict(stored.tensors)
    ranks, alphas = {}, {}
    root = 0.5 if stored.config.get("use_rslora") else 1
    for path, parts in _split_projections(stored, paths).items():
        pairs = [_pair(stored, part, parts) for part in parts]
        for a, b in pairs:
            del tensors[a.name], tensors[b.name]
        scales = {scale_of(stored, a.name, a.shape[0]) for a, _ in pairs}
        if len(scales) > 1:
            raise tensor_error(stored, pairs[0][0].name, "its projections have different scales")
        a, b = _one_pair(stored, base, path, pairs)
        tensors |= {a.name: a, b.name: b}
        ranks[re.escape(path)] = a.shape[0]
        alphas[re.escape(path)] = scales.pop() * float(a.shape[0]) ** root
    patterns = {
        option: changes | (stored.config.get(option) or {})
        for option, changes in (("rank_pattern", ranks), ("alpha_pattern", alphas))
    }
    return replace(stored, tensors=tensors, config=stored.config | patterns)


def _pair(stored: Adapter, part: str, parts: list[str]) -> tuple[TensorInfo, TensorInfo]:
    keys = [f"{part}.lora_{side}.weight" for side in "AB"]
    for key in keys:
        if key not in stored.tensors:
            present = next(k for k in stored.tensors if _path_of(k) in parts)
            raise tensor_error(
                stored,
                key,
                f"is missing, and '{present}' is of the same projection; copy the adapter again",
            )
    a, b = (replace(stored.tensors[key], name=key) for key in keys)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise tensor_error(
            stored, a.name, f"has shape {list(a.shape)}, and '{b.name}' {list(b.shape)}; copy the "
            "adapter again"
        )  # fmt: skip
    return a, b


def _one_pair(
    stored: Adapter, base: Checkpoint, path: str, pairs: list[tuple[TensorInfo, TensorInfo]]
) -> tuple[TensorInfo, TensorInfo]:
    """A (R, I) and B (O, R) of a fused projection from those of its parts, (r, I) and (o, r)."""
    outputs, inputs = base.names.shapes[f"{path}.weight"]
    rows = sum(b.shape[0] for _, b in pairs)
    complete = _SPLIT[path.rpartition(".")[2]].complete
    if (
        rows > outputs
        or (complete and rows != outputs)
        or any(a.shape[1] != inputs for a, _ in pairs)
    ):
        raise tensor_error(
            stored,
            pairs[0][0].name,
            f"the parts of '{path}' have {rows} outputs and {pairs[0][0].shape[1]} inputs, and the "
            f"base {base.folder} has {outputs} and {inputs}; it was trained on another base",
        )
    rank = sum(a.shape[0] for a, _ in pairs)

    def of_a() -> Tensor:
        return torch.cat([read_tensor(a) for a, _ in pairs])

    def of_b() -> Tensor:
        diagonal = torch.block_diag(*(read_tensor(b) for _, b in pairs))
        return torch.cat([diagonal, diagonal.new_zeros(outputs - rows, rank)])

    names = [f"{path}.lora_{side}.weight" for side in "AB"]
    first_a, first_b = pairs[0]
    return (
        computed(names[0], first_a.dtype, (rank, inputs), of_a),
        computed(names[1], first_b.dtype, (outputs, rank), of_b),
    )
