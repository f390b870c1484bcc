"""Write a checkpoint without some of its experts, tensor by tensor, without building the model.

Which tensors have an entry for each expert, and in which dimension, is read from transformers'
class: they are those whose shape follows the config's number of experts. Entries beyond the routed
experts', such as a router's rows for shared ones, stay.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_finetune.checkpoint.check_tensors import MTP, check_tensors
from moe_finetune.checkpoint.merge import index_file
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint
from moe_finetune.checkpoint.pruned_config import config_changes, quantization_changes
from moe_finetune.checkpoint.small_files import CARD_FILE, carried_files, model_card, public_name
from moe_finetune.checkpoint.tensor_names import Names
from moe_finetune.checkpoint.weight_files import Content, Progress, copy_of, write_checkpoint
from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.io import check_output, one_writer
from moe_finetune.io.checkpoint_files import INDEX, PRUNED, SINGLE
from moe_finetune.io.counted import counted
from moe_finetune.io.safetensors_header import Header, TensorInfo, build_header
from moe_finetune.models.class_structure import without_weights
from moe_finetune.models.expert_groups import ExpertGroups
from moe_finetune.models.family import CORRECTION_BIASES


@dataclass
class Pruning:
    """Everything that a pruning does; ``remaining``: the experts of each MoE layer, ascending."""

    base: Checkpoint
    output: Path
    remaining: dict[int, list[int]]
    files: dict[str, Header]
    contents: dict[str, Content] = field(repr=False)
    small_files: dict[str, bytes] = field(repr=False)
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(header.data_bytes for header in self.files.values())

    def text(self) -> str:
        """What was or would be done, in lines."""
        old, new = self.base.size / 1e9, self.size / 1e9
        return "\n".join(
            [
                f"{remaining_text(self.base, self.remaining)}; {old:.3f} GB -> {new:.3f} GB",
                *self.notes,
            ]
        )


def remaining_text(base: Checkpoint, remaining: Mapping[int, Sequence[int]]) -> str:
    """How many experts stay, in words."""
    count = len(next(iter(remaining.values())))
    layers = counted(len(remaining), "layer")
    return f"{count} of {base.places.num_experts} experts in each of {layers}"


@one_writer
def prune_experts(
    base: str | Path | Checkpoint,
    experts: Mapping[int, Sequence[int]],
    output: str | Path,
    *,
    name: str | None = None,
    chosen_by: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Pruning:
    """Write ``base`` with only ``experts``: a smaller checkpoint of its class.

    Stored bytes are copied, also of quantized experts; those that stay get new numbers in
    their old order, which ``pruned.json`` has. The output appears complete or not at all.

    Args:
        experts: those that stay, by decoder layer: equally many in every MoE layer, and in each
            group of a layer.
        name: of the base in the model card, such as its hub id.
        chosen_by: what chose the experts, for the model card.
        dry_run: only plan and check.
    """
    output = Path(output)
    check_output(output, overwrite)
    opened = open_checkpoint(base, stored=True)
    pruning = plan_pruning(opened, experts, output)
    card = model_card(
        name or opened.folder,
        f"{public_name(name or opened.folder)}, pruned",
        options={"Experts": remaining_text(opened, pruning.remaining), "Chosen by": chosen_by},
        folder=opened.folder,
        origin="Pruned from {} with moe-finetune: a smaller checkpoint of the same class. "
        f"`{PRUNED}` has the old number of each expert.",
    )
    pruning.small_files[CARD_FILE] = card.encode()
    if not dry_run:
        files, contents = pruning.files, pruning.contents
        write_checkpoint(output, files, contents, pruning.small_files, overwrite, progress)
    return pruning


def plan_pruning(base: Checkpoint, experts: Mapping[int, Sequence[int]], output: Path) -> Pruning:
    """Plan and check a pruning: nothing is read but headers, and nothing is written."""
    remaining = _checked(base, experts)
    count = len(next(iter(remaining.values())))
    changes, changed, config = config_changes(base, count)
    fates = _fates(base, remaining, without_weights(config))
    files: dict[str, Header] = {}
    contents: dict[str, Content] = {}
    parts = dict(_parts(base, fates))
    for file, header in base.files.items():
        target = file if len(base.files) > 1 or (base.folder / INDEX).is_file() else SINGLE
        layout = []
        for name in header.tensors:
            if (part := parts.get(name)) is not None:
                layout.append((part.name, part.source.dtype, part.shape))
                contents[part.name] = part.content()
        if layout:
            files[target] = build_header(Path(target), layout, header.metadata or None)
    _check_result(base, fates, config)
    renamed = {name: part.name for name, part in parts.items() if part is not None}
    changes |= quantization_changes(base, renamed, set(parts) - set(renamed))
    notes = [f"config.json: {key} becomes {json.dumps(value)}" for key, value in changed.items()]
    heads = sum(part == MTP for part in base.untrained.values())
    if heads:
        notes.append(f"{MTP} ({heads} tensors) is left out: it has experts of its own")
    small = carried_files(base.folder, changes) | index_file(base, files)
    small[PRUNED] = _record(base, remaining).encode()
    return Pruning(
        base=base,
        output=output,
        remaining=remaining,
        files=files,
        contents=contents,
        small_files=small,
        notes=notes,
    )


# -- which experts stay ---------------------------------------------------------------------------


def _checked(base: Checkpoint, experts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """``experts``, ascending, of every MoE layer; refused if no model of the class has them."""
    family = base.family
    config = base.model_config.get_text_config()
    places = base.places
    if by_token := family.fixed_layers(config):
        raise DataError(
            f"{family.title}: layers {by_token} look experts up by token, each of which needs its "
            "own; this checkpoint cannot be pruned"
        )
    layers = list(places.moe_layers)
    if sorted(experts) != layers:
        raise DataError(
            f"--experts: has layers {sorted(experts)}, and the MoE layers are {layers}; choose "
            "experts for each ('moe-finetune select TRACE --keep 0.75')"
        )
    remaining = {layer: sorted(set(experts[layer])) for layer in layers}
    sizes = {layer: len(ids) for layer, ids in remaining.items()}
    last = {layer: ids[-1] for layer, ids in remaining.items() if ids}
    wrong = next((n for n, expert in last.items() if expert >= places.num_experts), None)
    if wrong is not None:
        raise DataError(
            f"--experts: layer {wrong} names expert {last[wrong]}, the last one is "
            f"{places.num_experts - 1}; select again on this checkpoint"
        )
    fewest, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[fewest] != sizes[most]:
        raise DataError(
            f"--experts: {sizes[fewest]} of layer {fewest} and {sizes[most]} of layer {most}, but "
            "a config has one number for all layers; select with --keep, or --top"
        )
    if sizes[most] == places.num_experts:
        raise DataError("--experts: names all experts, so nothing would be pruned; keep fewer")
    groups = ExpertGroups.of(family, config)
    for layer, ids in remaining.items():
        if problem := groups.problem(ids, places.num_experts):
            raise DataError(f"--experts: layer {layer}: {problem}")
    return remaining


def _record(base: Checkpoint, remaining: Mapping[int, Sequence[int]]) -> str:
    """The content of ``pruned.json``: the new number of each old one, by layer."""
    numbers = {
        str(layer): {str(old): new for new, old in enumerate(ids)}
        for layer, ids in remaining.items()
    }
    document = {
        "base": public_name(base.folder),
        "model_type": base.model_config.model_type,
        "num_experts": base.places.num_experts,
        "new_number": numbers,
    }
    return json.dumps(document, indent=1) + "\n"


# -- what becomes of each tensor ------------------------------------------------------------------


@dataclass(frozen=True)
class _Fate:
    """A tensor's name after pruning, and which entries of which dimension stay; None: all."""

    name: str
    dimension: int | None = None
    entries: Sequence[int] = ()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.dimension is None:
            return shape
        return (*shape[: self.dimension], len(self.entries), *shape[self.dimension + 1 :])


@dataclass(frozen=True)
class _Part:
    """A stored tensor that stays, perhaps with fewer entries."""

    source: TensorInfo
    fate: _Fate
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.fate.shape(self.source.shape)

    def content(self) -> Content:
        if self.fate.dimension is None:
            return copy_of(self.source)
        return entries_of(self.source, self.fate.dimension, self.fate.entries)


def entries_of(source: TensorInfo, dimension: int, entries: Sequence[int]) -> Content:
    """The stored bytes of some entries of a dimension; refuses NaN and infinity."""
    repeats, inner = math.prod(source.shape[:dimension]), source.shape[dimension + 1 :]
    total = source.shape[dimension]
    size = source.size // (repeats * total)

    def chunks(target: TensorInfo) -> Iterator[Tensor]:
        for repeat in range(repeats):
            for entry in entries:
                offset = source.offset + (repeat * total + entry) * size
                yield from copy_of(replace(source, shape=inner, offset=offset, size=size))(target)

    return chunks


def _fates(
    base: Checkpoint, remaining: Mapping[int, Sequence[int]], pruned: Any
) -> dict[str, _Fate | None]:
    """What becomes of each tensor of ``base``, whose class with fewer experts is ``pruned``."""
    names, total = base.names, base.places.num_experts
    shapes = {name: tuple(value.shape) for name, value in pruned.state_dict().items()}
    layer_of = re.compile(re.escape(base.places.backbone) + r"\.layers\.(\d+)\.")
    numbered: dict[str, dict[str, tuple[int, int]]] = {}
    fates: dict[str, _Fate | None] = {}
    for name, info in base.tensors.items():
        loaded = names.loaded[name]
        old, new = names.shapes.get(loaded), shapes.get(loaded)
        if base.untrained.get(name) == MTP:
            fates[name] = None
            continue
        if old is None and name.endswith(CORRECTION_BIASES):  # written for vLLM's class
            old, new = info.shape, tuple(-1 if size == total else size for size in info.shape)
        if old is None or old == new:
            fates[name] = _Fate(name)
            continue
        assert new is not None
        layer = layer_of.match(loaded)
        assert layer is not None
        if int(layer[1]) not in remaining:  # the bias of a head that predicts further tokens
            fates[name] = None
            continue
        ids = remaining[int(layer[1])]
        if len(old) == 3 and not names.stacked(name):
            if loaded not in numbered:
                numbered[loaded] = {
                    stored: (expert, part)
                    for expert, of_expert in enumerate(names.names_of_experts(loaded))
                    for part, stored in enumerate(of_expert)
                }
            expert, part = numbered[loaded][name]
            of_experts = names.names_of_experts(loaded)
            fates[name] = _Fate(of_experts[ids.index(expert)][part]) if expert in ids else None
            continue
        size = next(one for one, other in zip(old, new, strict=True) if one != other)
        matching = [at for at, stored in enumerate(info.shape) if stored == size]
        if len(matching) != 1 and old == info.shape:
            matching = [
                at for at, (one, two) in enumerate(zip(old, new, strict=True)) if one != two
            ]
        if len(matching) != 1:
            raise CheckpointError(
                f"{info.file}: '{name}' has shape {list(info.shape)}, which cannot be divided by "
                f"the {total} experts; save the checkpoint again with transformers"
            )
        fates[name] = _Fate(name, matching[0], (*ids, *range(total, size)))
    return fates


def _parts(
    base: Checkpoint, fates: Mapping[str, _Fate | None]
) -> Iterator[tuple[str, _Part | None]]:
    """Each stored tensor by name, and what of it stays: packed values and scales follow theirs."""
    for name, fate in fates.items():
        stored = [base.tensors[name]] if base.quantized is None else base.quantized.stored(name)
        for part in stored:
            if fate is None:
                yield part.name, None
                continue
            stem = name.rpartition(".")[0]
            new_name = part.name
            if fate.name != name:
                new_name = fate.name.rpartition(".")[0] + part.name.removeprefix(stem)
            if fate.dimension is not None and len(stored) > 1:
                total = base.tensors[name].shape[fate.dimension]
                if fate.dimension != 0 or part.shape[0] != total:
                    raise CheckpointError(
                        f"{part.file}: '{part.name}' is stored quantized, with several experts in "
                        "a block; prune the unquantized checkpoint"
                    )
            yield part.name, _Part(part, fate, new_name)


def _check_result(base: Checkpoint, fates: Mapping[str, _Fate | None], config: Any) -> None:
    """Check that what stays is exactly what the class with fewer experts needs."""
    tensors = {
        fate.name: replace(base.tensors[name], name=fate.name, shape=fate.shape(info.shape))
        for name, info in base.tensors.items()
        if (fate := fates[name]) is not None
    }
    names = Names(config, {name: info.shape for name, info in tensors.items()})
    check_tensors(base.folder, tensors, names, config, base.family)
