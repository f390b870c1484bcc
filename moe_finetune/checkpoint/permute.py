"""Reorder the routed experts of a checkpoint: router rows, routing bias and expert tensors.

The model computes the same function. Only the experts' numbers change, and with linear placement
the ranks that serve them. Every tensor keeps its place in its file, so that the inverse permutation
restores the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.card import CARD_FILE, model_card, public_name
from moe_finetune.checkpoint.carried import carried_files
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.errors import CheckpointError
from moe_finetune.io import check_output, one_writer
from moe_finetune.io.checkpoint_files import INDEX
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import TensorInfo

if TYPE_CHECKING:
    from moe_finetune.checkpoint.writer import Content, Output

Permutation = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class PermuteReport:
    """What a permutation wrote: folder, reordered layers, moved tensors, bytes and wall seconds."""

    output: Path
    layers: tuple[int, ...]
    moved: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class Rows:
    """Content whose row i is row ``order[i]`` of a stored tensor (router, bias, fused stack)."""

    source: TensorInfo
    order: tuple[int, ...]

    def write(self, out: Output, target: TensorInfo) -> None:
        from moe_finetune.checkpoint.tensors import read_bytes
        from moe_finetune.checkpoint.values import check_values

        check_values([self.source], CheckpointError)
        size = self.source.size // len(self.order)
        for position, row in enumerate(self.order):
            one = read_bytes(self.source.file, self.source.offset + row * size, size)
            out.write(one, target.offset + position * size)


@dataclass(frozen=True)
class Renumbered:
    """A stored tensor of expert numbers, with each number replaced by the expert's new one."""

    source: TensorInfo
    order: tuple[int, ...]

    def write(self, out: Output, target: TensorInfo) -> None:
        import torch

        from moe_finetune.checkpoint.tensors import read_tensor

        old = read_tensor(self.source)
        new_of_old = torch.empty(len(self.order), dtype=old.dtype)
        new_of_old[list(self.order)] = torch.arange(len(self.order), dtype=old.dtype)
        out.write(new_of_old[old.long()].view(-1).view(torch.uint8), target.offset)


@one_writer
def permute_experts(
    base: str | Path,
    permutation: Permutation,
    output: str | Path,
) -> PermuteReport:
    """Write ``base`` with the experts of some layers reordered, streaming tensor by tensor.

    Args:
        permutation: decoder layer -> list; new expert i is old expert ``permutation[layer][i]``.
            Layers that are not listed do not change.

    Raises:
        CheckpointError: a layer has no experts, a list is not a permutation, or it splits the
            groups of a family with grouped routing.
        OutputExistsError, OutputBusyError, DiskSpaceError: before anything is written.
    """
    from moe_finetune.checkpoint.writer import Copy, write_checkpoint

    started = time.perf_counter()
    output = Path(output)
    check_output(output)
    opened = open_checkpoint(base)
    check_permutation(opened, permutation)
    contents: dict[str, Content] = {name: Copy(info) for name, info in opened.tensors.items()}
    moved = 0
    for layer, order in permutation.items():
        for name, content in _layer(opened, layer, tuple(order)).items():
            contents[name] = content
            moved += 1
    small = carried_files(opened.folder)
    small[CARD_FILE] = model_card(
        opened.folder,
        f"{public_name(opened.folder)}, experts reordered",
        origin="{} with its experts reordered by moe-finetune; it computes the same.",
    ).encode()
    if (opened.folder / INDEX).is_file():
        small[INDEX] = (opened.folder / INDEX).read_bytes()
    size = write_checkpoint(output, opened.files, contents, small)
    seconds = time.perf_counter() - started
    return PermuteReport(output, tuple(sorted(permutation)), moved, size, seconds)


def inverse(permutation: Permutation) -> dict[int, list[int]]:
    """The permutation that undoes ``permutation``."""
    return {
        layer: sorted(range(len(order)), key=order.__getitem__)
        for layer, order in permutation.items()
    }


def read_permutation(file: str | Path) -> dict[int, list[int]]:
    """Read ``{"<layer>": [old expert of place 0, of place 1, ...]}`` from a JSON file."""
    content = read_mapping(Path(file))
    if not content or not all(
        key.isdigit()
        and str(int(key[:9])) == key
        and isinstance(order, list)
        and all(type(expert) is int for expert in order)
        for key, order in content.items()
    ):
        raise CheckpointError(f"{file}: must map a layer's number to a list of expert numbers")
    return {int(key): order for key, order in content.items()}


def read_mapping(file: Path) -> dict[str, Any]:
    """The JSON object in a plan's or a permutation's file."""
    return read_object(file, CheckpointError, "write one with 'moe-finetune place'")


def check_permutation(base: Checkpoint, permutation: Permutation) -> None:
    """Raise CheckpointError unless ``permutation`` can be applied to ``base``."""
    groups, _ = base.family.groups(base.model_config)
    for layer, order in permutation.items():
        experts = base.experts.get(layer)
        if experts is None:
            layers = f"{min(base.experts)}-{max(base.experts)}" if base.experts else "none"
            raise CheckpointError(
                f"permutation: layer {layer} of {base.folder} has no experts; layers with: {layers}"
            )
        if sorted(order) != list(range(experts)):
            raise CheckpointError(
                f"permutation: layer {layer} must list each of 0-{experts - 1} once, got "
                f"{len(order)} entries, {len(set(order))} different"
            )
        size = experts // groups
        if any(
            len({old // size for old in order[first : first + size]}) > 1
            for first in range(0, experts, size)
        ):
            raise CheckpointError(
                f"permutation: layer {layer} mixes the {groups} routing groups (n_group) of "
                f"{size} experts; the model would route differently; keep each group together"
            )


def _layer(base: Checkpoint, layer: int, order: tuple[int, ...]) -> dict[str, Content]:
    """New contents of every tensor in ``layer`` that is indexed by expert."""
    from moe_finetune.checkpoint.writer import Copy

    disk = base.family.disk
    contents: dict[str, Content] = {}
    block = disk.block.format(layer=layer)
    stacks = (disk.gate_up, disk.down) if disk.fused else ()
    for part in (disk.router, disk.router_bias, *stacks, *disk.per_expert):
        name = f"{block}.{part}"
        if name in base.tensors:
            # Rows after the routed experts' belong to shared experts, and stay.
            rows = (*order, *range(len(order), base.tensors[name].shape[0]))
            contents[name] = Rows(base.tensors[name], rows)
    ids = f"{block}.{disk.expert_ids}"
    if ids in base.tensors:
        contents[ids] = Renumbered(base.tensors[ids], order)
    if disk.fused:
        return contents
    # An expert's other tensors on disk (quantization scales) move with it.
    head = f"{block}.{disk.down.partition('{expert}')[0]}"
    for name, target in base.tensors.items():
        expert, dot, leaf = name.removeprefix(head).partition(".")
        if not (name.startswith(head) and dot and expert.isdigit()):
            continue
        source = base.tensors.get(f"{head}{order[int(expert)]}.{leaf}")
        if source is None or (source.dtype, source.shape) != (target.dtype, target.shape):
            raise CheckpointError(
                f"{base.folder}: experts {expert} and {order[int(expert)]} of layer {layer} "
                f"differ in dtype or shape of '{leaf}'; they cannot be exchanged"
            )
        contents[name] = Copy(source)
    return contents
