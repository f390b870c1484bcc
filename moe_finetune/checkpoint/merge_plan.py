"""The merge as data: every output tensor with its source and its updates.

Nothing is computed or written here; an impossible merge raises while it is planned.
``MergePlan.text`` is what ``--dry-run`` prints.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.adapter import Adapter
from moe_finetune.checkpoint.bias import plan_bias
from moe_finetune.checkpoint.carried import carried_files
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.untrained import stale_head
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import COPY_AGAIN, INDEX, SINGLE, index_text
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import FLOATS, ITEM_BYTES, Header, TensorInfo, build_header
from moe_finetune.models.base import CORRECTION_BIASES

if TYPE_CHECKING:
    from moe_finetune.checkpoint.updates import Part

# Names of the --dtype option as stored in safetensors.
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Selection is decided by differences smaller than half precision resolves; it stays in float32.
_KEPT_FLOAT32 = (*CORRECTION_BIASES, ".gate.bias")


@dataclass(frozen=True)
class TensorPlan:
    """One output tensor.

    Attributes:
        target: name, dtype, shape and place in the output (``file`` is the output's file name).
        source: the base tensor; None if the base has none.
        updates: what replaces the source or is added to it, in order.
        value: raw bytes that replace the source.
        float_name: the float tensor that the updates change, where this tensor is a packed part of
            it.
    """

    target: TensorInfo
    source: TensorInfo | None
    updates: tuple[Part, ...] = ()
    value: bytes | None = field(default=None, repr=False)
    float_name: str | None = None

    @property
    def stacked(self) -> int:
        """Number of stacked expert matrices in the tensor; 1 for a single matrix."""
        in_stack = any(part.place.expert is not None for part in self.updates)
        return self.target.shape[0] if in_stack else 1

    @property
    def copied(self) -> bool:
        return (
            self.source is not None
            and not self.updates
            and self.value is None
            and self.source.dtype == self.target.dtype
        )


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge will do.

    Attributes:
        files: header of every output weight file by name.
        tensors: every output tensor by name, in file and data order.
        small_files: the other files of the output, name -> content.
        notes: notes for the user (changed config fields, dropped bias).
    """

    base: Checkpoint
    adapter: Adapter
    files: dict[str, Header]
    tensors: dict[str, TensorPlan]
    small_files: dict[str, bytes] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        weights = sum(header.file_bytes for header in self.files.values())
        return weights + sum(len(content) for content in self.small_files.values())

    @property
    def changed(self) -> list[TensorPlan]:
        return [t for t in self.tensors.values() if t.updates or t.value is not None]

    def kinds(self) -> list[str]:
        """A line for each kind of changed tensor: name without numbers, update and count."""
        from moe_finetune.checkpoint.updates import Replace

        counts: Counter[tuple[str, str]] = Counter()
        for plan in self.changed:
            name = ".".join("*" if part.isdigit() else part for part in plan.target.name.split("."))
            how = "routing bias" if plan.value is not None else "low-rank update"
            if any(isinstance(part.update, Replace) for part in plan.updates):
                how = "replaced by the adapter's tensor"
            if plan.float_name is not None:
                how += ", requantized"
            counts[name, how] += 1
        return [f"  {name}: {how}, {count}" for (name, how), count in sorted(counts.items())]

    def text(self) -> str:
        """What ``--dry-run`` prints: kinds of changes, counts and notes."""
        copied = sum(plan.copied for plan in self.tensors.values())
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return "\n".join(
            [
                *self.kinds(),
                f"{len(self.changed)} tensors changed, {copied} copied byte for byte, "
                f"{len(self.tensors)} tensors in {files}, {self.size / 1e9:.3f} GB",
                *self.notes,
            ]
        )


def plan_merge(
    base: Checkpoint,
    adapter: Adapter,
    dtype: str | None = None,
    bias: Mapping[int, Sequence[float]] | None = None,
) -> MergePlan:
    """Plan ``base + adapter``.

    Args:
        dtype: "float32", "float16", "bfloat16", or None to keep each tensor's stored dtype.
        bias: loss-free routing bias by decoder layer, one number per expert.

    Raises:
        AdapterError: see :func:`moe_finetune.checkpoint.updates.read_updates`.
        CheckpointError: a tensor to change has a dtype that cannot be added to, or ``dtype`` is set
            and the base is stored quantized.
        UnsupportedModelError: the family cannot store a bias.
    """
    from moe_finetune.checkpoint.updates import parts_in_files, read_updates  # need torch

    if dtype is not None and dtype not in STORED:
        raise CheckpointError(f"dtype '{dtype}' must be one of {', '.join(STORED)}")
    if dtype is not None and base.quantized is not None:
        raise CheckpointError(
            f"dtype '{dtype}': {base.folder} is stored as {base.quantized.format}, and the merged "
            "checkpoint keeps that format; leave dtype out, or merge into an unquantized base"
        )
    packed = base.quantized.packed() if base.quantized is not None else {}
    values, config_changes, notes = plan_bias(base, bias)
    updates = read_updates(adapter, base)
    parts = parts_in_files(updates, base, adapter)
    if updates.attention_only:
        notes.append(
            f"{adapter.folder.name}: attention only. Its target_modules name matrices of the "
            "experts, but PEFT before 0.19 found none of them in the stacks of transformers 5"
        )
    files: dict[str, Header] = {}
    tensors: dict[str, TensorPlan] = {}
    for name, header in base.files.items():
        file = name if len(base.files) > 1 or (base.folder / INDEX).is_file() else SINGLE
        in_file = {k: v for k, v in values.items() if v.file == name}
        files[file] = _target_header(header, Path(file), dtype, in_file)
        for target in files[file].tensors.values():
            value = values.get(target.name)
            quantized_name = packed.get(target.name)
            changes = parts.get(quantized_name or target.name, ())
            tensors[target.name] = TensorPlan(
                target,
                header.tensors.get(target.name),
                tuple(changes) if value is None else (),
                value.content if value else None,
                quantized_name,
            )
    for plan in tensors.values():
        floats = plan.float_name is not None or plan.source is None or plan.source.dtype in FLOATS
        if plan.updates and plan.source and not floats:
            raise CheckpointError(
                f"{plan.source.file}: '{plan.target.name}' is stored as {plan.source.dtype}; an "
                "adapter cannot be merged into a quantized checkpoint; use the unquantized one"
            )
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in base.config] or ["dtype"]
        config_changes |= {key: dtype for key in keys if base.config.get(key) != dtype}
    notes += [f"config.json: {k} becomes {json.dumps(v)}" for k, v in config_changes.items()]
    if any(plan.updates or plan.value for plan in tensors.values()):
        notes += stale_head(base)
    small = carried_files(base.folder, config_changes)
    small.update(index_file(base, files))
    return MergePlan(base, adapter, files, tensors, small, tuple(notes))


def index_file(base: Checkpoint, files: Mapping[str, Header]) -> dict[str, bytes]:
    """The index for ``files``: the base's own bytes if they still fit; empty for a single file."""
    infos = [info for header in files.values() for info in header.tensors.values()]
    weight_map, total = {info.name: info.file.name for info in infos}, sum(i.size for i in infos)
    old = base.folder / INDEX
    if old.is_file():
        content = old.read_bytes()
        index = read_object(old, CheckpointError, COPY_AGAIN)
        total_size = (index.get("metadata") or {}).get("total_size", total)
        if index["weight_map"] == weight_map and (total_size == total or total == base.size):
            return {INDEX: content}
    return {} if list(files) == [SINGLE] else {INDEX: index_text(infos).encode()}


def _target_header(
    header: Header, file: Path, dtype: str | None, added: Mapping[str, Any]
) -> Header:
    def stored(info: TensorInfo) -> str:
        if info.name in added:
            return "F32"
        if dtype is None or info.dtype not in FLOATS or info.name.endswith(_KEPT_FLOAT32):
            return info.dtype
        return STORED[dtype]

    layout = [(info.name, stored(info), info.shape) for info in header.tensors.values()]
    layout += [(n, "F32", (len(v.content) // ITEM_BYTES["F32"],)) for n, v in added.items()
               if n not in header.tensors]  # fmt: skip
    if layout == [(info.name, info.dtype, info.shape) for info in header.tensors.values()]:
        moved = {  # as replace(), which takes a second for a hundred thousand
            n: TensorInfo(n, file, info.dtype, info.shape, info.offset, info.size)
            for n, info in header.tensors.items()
        }
        return Header(file, moved, header.metadata, header.raw)
    return build_header(file, layout, header.metadata or None)
