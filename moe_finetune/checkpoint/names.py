"""Which tensors of a checkpoint's files make up each tensor of the loaded model, and which part.

transformers' own renaming says it: every name of the files passes through it as on loading, and
what it did is reverted for the way back. Published layouts that transformers reads are thus written
as they were read, whether they stack experts, transpose them, or name them for another class.

Shape legend: E experts, O rows and I columns of a matrix.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CheckpointError
from moe_finetune.models.structure import class_of


@dataclass(frozen=True)
class Place:
    """Where rows of a matrix of the loaded model lie in the files.

    Attributes:
        name: the tensor in the files.
        expert: which matrix of a stack there; None if the tensor is the matrix.
        rows: which rows of the loaded matrix, in the files' order.
        transposed: the files have the transpose of these rows.
    """

    name: str
    expert: int | None = None
    rows: slice | Tensor = field(default_factory=lambda: slice(None))
    transposed: bool = False


class Names:
    """The names in a checkpoint's files and in the model that transformers loads from them.

    Attributes:
        model: the model on the meta device, in float32.
        shapes: shape of every tensor of the model.
        files: loaded name -> names in the files. A name may be in several entries: some classes
            split a stored tensor.
        loaded: name in the files -> loaded name.
    """

    def __init__(self, config: Any, stored: Mapping[str, tuple[int, ...]]):
        """``stored`` has the shape of each tensor in the files."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        self.model = on_meta(config)
        state = self.model.state_dict()
        self.shapes = {name: tuple(value.shape) for name, value in state.items()}
        self._stored = stored
        mapping = get_model_conversion_mapping(self.model)
        renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
        converters = [change for change in mapping if isinstance(change, WeightConverter)]
        prefix = self.model.base_model_prefix
        self.files: dict[str, list[str]] = {}
        for name in stored:
            loaded, _ = rename_source_key(name, renamings, converters, prefix, state)
            if loaded not in state:  # as on loading: a name that was right already
                unchanged, _ = rename_source_key(name, [], [], prefix, state)
                loaded = unchanged if unchanged in state else loaded
            self.files.setdefault(loaded, []).append(name)
        self.model._weight_conversions = [change for change in mapping if change.was_used()]
        self.loaded = {name: loaded for loaded, names in self.files.items() for name in names}
        self._groups: dict[str, list[str]] = {}
        self._groups = self._split_tensors()
        self._by_expert: dict[str, list[list[str]]] = {}
        self._rows: dict[Any, list[tuple[slice | Tensor, bool]]] = {}

    def places(self, loaded: str) -> list[list[Place]]:
        """For the matrix of a loaded tensor, or for each one of a stack, where its rows lie."""
        shape = self.shapes[loaded]
        stack = len(shape) == 3
        names = self.names_of_experts(loaded) if stack else [self.files[loaded]]
        # Layers are alike: what happens to the rows is asked once for all of them.
        kind = shape, *(_NUMBER.sub("#", name) for name in (loaded, *names[0]))
        if kind not in self._rows:
            sizes = shape[1:] if stack else shape
            rows_OI = torch.arange(sizes[0] if sizes else 1, dtype=torch.float32)
            rows_OI = rows_OI.view(-1, *[1] * (len(sizes) - 1)).expand(sizes)
            pieces = self.of_expert(loaded, 0, rows_OI) if stack else self.pieces(loaded, rows_OI)
            self._rows[kind] = [_rows_of(pieces[name]) for name in names[0]]
        return [
            [
                Place(name, expert if stack and self.stacked(name) else None, *rows)
                for name, rows in zip(of_expert, self._rows[kind], strict=True)
            ]
            for expert, of_expert in enumerate(names)
        ]

    def pieces(self, loaded: str, value: Tensor) -> dict[str, Tensor]:
        """Split ``value``, of the loaded tensor's shape, as the files store it.

        Where the files' tensor belongs to several of the model, the others' part is zero.
        """
        return self._named(loaded, self._reverted(self.model, loaded, value))

    def of_expert(self, loaded: str, expert: int, value_OI: Tensor) -> dict[str, Tensor]:
        """Split one matrix of a stack: a name in the files -> the part that lies there.

        Where the files also have a stack, the part belongs to its entry ``expert``.
        """
        parts = self._reverted(_Part(self.model, 1), loaded, value_OI[None]).values()
        names = self.names_of_experts(loaded)[expert]
        matrices = [part[0] if part.ndim == 3 else part for part in parts]
        return {n: self._turned(n, m) for n, m in zip(names, matrices, strict=True)}

    def names_of_experts(self, loaded: str) -> list[list[str]]:
        """For each matrix of a stack the names in the files, in the order of the conversion."""
        if loaded not in self._by_expert:
            experts = self.shapes[loaded][0]
            numbers_E44 = torch.arange(experts, dtype=torch.float32)[:, None, None].expand(-1, 4, 4)
            names: list[list[str]] = [[] for _ in range(experts)]
            reverted = self._reverted(_Part(self.model, experts, 4), loaded, numbers_E44)
            for name, piece in self._named(loaded, reverted, turned=False).items():
                if piece.ndim == 3:
                    for of_expert in names:
                        of_expert.append(name)
                else:
                    names[int(piece.max())].append(name)
            self._by_expert[loaded] = names
        return self._by_expert[loaded]

    def siblings(self, loaded: str) -> tuple[str, ...]:
        """All tensors of the model that loading splits from the stored tensor of ``loaded``."""
        return tuple(self._groups.get(loaded, (loaded,)))

    def stacked(self, name: str) -> bool:
        """Return whether the tensor of the files has a matrix for each expert."""
        return len(self._stored[name]) == 3

    def _split_tensors(self) -> dict[str, list[str]]:
        """Tensors of the model that loading splits from one of the files, and their siblings."""
        orphans: dict[str, str] = {}
        for loaded, shape in self.shapes.items():
            if loaded not in self.files and self.files:
                names = list(self._reverted(self.model, loaded, torch.empty(shape, device="meta")))
                if len(names) == 1:  # else a stack that the files lack
                    orphans[loaded] = names[0]
        if not orphans:
            return {}
        groups: dict[str, list[str]] = {}
        prefix = f"{self.model.base_model_prefix}."
        for orphan, name in orphans.items():
            for other in (name, name.removeprefix(prefix), prefix + name):
                if (first := self.loaded.get(other)) is not None:
                    groups.setdefault(first, [first]).append(orphan)
                    self.files[orphan] = [other]
                    break
        return {loaded: group for group in groups.values() for loaded in group}

    def _reverted(self, model: Any, loaded: str, value: Tensor) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        values = {loaded: value}
        for sibling in self._groups.get(loaded, ()):
            if sibling != loaded:
                sizes = self.shapes[sibling]
                given = value.shape if value.shape != self.shapes[loaded] else sizes
                values[sibling] = value.new_zeros(given)
        reverted: dict[str, Tensor] = revert_weight_conversion(model, values)
        return reverted

    def _named(
        self, loaded: str, values: Mapping[str, Tensor], turned: bool = True
    ) -> dict[str, Tensor]:
        """``values`` under the files' names: the reverted ones may have a prefix too many."""
        known, prefix = set(self.files[loaded]), f"{self.model.base_model_prefix}."
        pieces = {}
        for name, value in values.items():
            others = (name, name.removeprefix(prefix), prefix + name)
            known_as = next((other for other in others if other in known), None)
            if known_as is None and len(known) == len(values) == 1:
                (known_as,) = known
            if known_as is not None:
                pieces[known_as] = self._turned(known_as, value) if turned else value
        if pieces.keys() != known:
            raise CheckpointError(
                f"'{loaded}' is stored as {sorted(known)[:2]}, but transformers would write "
                f"{sorted(values)[:2]}; save the checkpoint again with transformers"
            )
        return pieces

    def _turned(self, name: str, value: Tensor) -> Tensor:
        """``value`` as the files store it: transformers transposes some stacks by their shape."""
        shape = self._stored[name][-value.ndim :] if value.ndim else ()
        if value.ndim > 1 and tuple(value.mT.shape) == shape != tuple(value.shape):
            return value.mT
        return value.reshape(shape)


class _Part:
    """Stands for the model where a conversion compares a shape: with few experts, or small ones."""

    def __init__(self, model: Any, experts: int, size: int | None = None):
        self.config, self._weight_conversions = model.config, model._weight_conversions
        self._model, self._experts, self._size = model, experts, size

    def get_parameter(self, name: str) -> Tensor:
        parameter: Tensor = self._model.get_parameter(name)[: self._experts]
        return parameter[:, : self._size, : self._size]


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


def _rows_of(piece_OI: Tensor) -> tuple[slice | Tensor, bool]:
    """Which rows a piece has, by their numbers in it, and whether it is transposed."""
    if piece_OI.ndim == 0:
        return slice(None), False
    rows = piece_OI.flatten(1) if piece_OI.ndim > 1 else piece_OI[:, None]
    transposed = bool((rows != rows[:, :1]).any())
    ids = (rows[0] if transposed else rows[:, 0]).long()
    first, last = int(ids[0]), int(ids[-1]) + 1
    consecutive = torch.equal(ids, torch.arange(first, first + len(ids)))
    return (slice(first, last) if consecutive else ids), transposed


def on_meta(config: Any) -> Any:
    """The model of a checkpoint's config on the meta device, in float32."""
    with torch.device("meta"):
        return class_of(config).from_config(copy.deepcopy(config), dtype=torch.float32)
