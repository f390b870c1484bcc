"""Which tensors of a checkpoint's files make up each tensor of the loaded model, and which part.

transformers' own renaming says it: every name of the files passes through it as on loading, and
what it did is reverted for the way back. Published layouts that transformers reads are thus written
as they were read, whether they stack experts, transpose them, or name them for another class.

Shape legend: E experts, O rows and I columns of a matrix.
"""

import copy
import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import CheckpointError
from moe_finetune.models.class_structure import class_of, without_weights


@dataclass(frozen=True)
class Place:
    """Where ``rows`` of a matrix of the loaded model lie in the files, perhaps transposed.

    ``expert``: which matrix of a stack there; None if the tensor is the matrix.
    """

    name: str
    expert: int | None = None
    rows: slice | Tensor = field(default_factory=lambda: slice(None))
    transposed: bool = False


class Names:
    """The names in a checkpoint's files and in the model that transformers loads from them.

    Attributes:
        shapes: shape of every tensor of the model.
        files: loaded name -> names in the files. A name may be in several entries: some classes
            split a stored tensor.
        loaded: name in the files -> loaded name.
        split: tensors of the model that loading makes from a part of a stored one.
    """

    def __init__(self, config: Any, stored: Mapping[str, tuple[int, ...]]):
        """``stored`` has the shape of each tensor in the files."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._meta = without_weights(config)
        self._state = self._meta.state_dict()
        self.shapes = {name: tuple(value.shape) for name, value in self._state.items()}
        self._stored = stored
        mapping = get_model_conversion_mapping(self._meta)
        self._renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
        self._converters = [change for change in mapping if isinstance(change, WeightConverter)]
        self._prefix = self._meta.base_model_prefix
        self.files: dict[str, list[str]] = {}
        used: set[int] = set()  # only conversions that led to a name of the model are reverted
        for name in stored:
            for change in mapping:
                change._was_used = False
            loaded, changed = self._load(name)
            if changed:
                used.update(n for n, change in enumerate(mapping) if change.was_used())
            self.files.setdefault(loaded, []).append(name)
        self._model: Any = _Part(self._meta, [mapping[index] for index in sorted(used)])
        self.loaded = {name: loaded for loaded, names in self.files.items() for name in names}
        self.split = self._split_tensors()
        self._by_expert: dict[str, list[list[str]]] = {}
        self._rows: dict[Any, list[tuple[slice | Tensor, bool]]] = {}

    def needed(self) -> dict[str, Tensor]:
        """Every tensor of the files that the model needs, as the files store it, without values."""
        return self._as_stored(self._state)

    def in_files(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A whole model's ``state`` under the files' names and in their layout.

        A tensor that is tied to another is left out; names that the model does not have stay. One
        that the files would not have is refused.
        """
        aliases = {
            name
            for name, source in self.tied.items()
            if name in state and source in state and torch.equal(state[name], state[source])
        }
        known = {n: t for n, t in state.items() if n in self.shapes and n not in aliases}
        tensors = self._as_stored(known)
        unknown = sorted(tensors.keys() - self._stored.keys())
        if unknown:
            raise CheckpointError(
                f"'{unknown[0]}' would be saved, a name that the base's files do not have "
                f"({len(unknown)} such tensors); train an adapter and merge it, or save the base "
                "again with transformers first"
            )
        return tensors | {n: t for n, t in state.items() if n not in self.shapes}

    def _as_stored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the loaded model as the files name and store them.

        transformers reverts its own conversions; a name that it reverts to one that the files do
        not have is the other published name of the same loaded tensor.
        """
        from transformers.core_model_loading import revert_weight_conversion

        reverted = revert_weight_conversion(self._model, dict(state))
        stored_as = {name: self._known_as(name, self._stored) or name for name in reverted}
        lacking: dict[str, list[str]] = {}
        for name, stored in stored_as.items():
            if stored not in self._stored:
                lacking.setdefault(self._load(name)[0], []).append(name)
        named = set(stored_as.values())
        for loaded, names in lacking.items():
            others = [name for name in self.files.get(loaded, ()) if name not in named]
            stored_as |= self._stored_as(names, others)
        tensors: dict[str, Tensor] = {}
        for name, tensor in reverted.items():
            shapes = tuple(tensor.shape), tuple(tensor.mT.shape) if tensor.ndim == 3 else ()
            turned = self.turns and shapes[0] != shapes[1] == self._stored.get(stored_as[name])
            tensors[stored_as[name]] = tensor.mT if turned else tensor
        return tensors

    @property
    def tied(self) -> dict[str, str]:
        """Loaded names that the config ties, such as the head's, each with that of its source."""
        return dict(getattr(self._meta, "all_tied_weights_keys", {}))

    def _load(self, name: str) -> tuple[str, bool]:
        """The loaded name for one in the files, and whether it went through the conversions."""
        from transformers.core_model_loading import rename_source_key

        loaded, _ = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if loaded in self._state:
            return loaded, True
        unchanged, _ = rename_source_key(name, [], [], self._prefix, self._state)
        # As on loading: a name that was right already.
        return (unchanged, False) if unchanged in self._state else (loaded, False)

    @property
    def turns(self) -> bool:
        """Whether transformers transposes stacks if their shape says so."""
        changes = self._model._weight_conversions
        operations = [op for change in changes for op in getattr(change, "operations", ())]
        return any(getattr(operation, "check_dims", False) for operation in operations)

    def stack(self, backbone: str) -> str:
        """How the names of the decoder's layers begin in the files."""
        inside = f"{backbone}.layers."
        for loaded, names in self.files.items():
            if loaded in self.shapes and loaded.startswith(inside):
                return f"{names[0].partition('layers.')[0]}layers."
        return inside

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
        """Split ``value``, of the loaded tensor's shape, as the files store it."""
        return self._named(loaded, self._reverted(self._model, loaded, value))

    def of_expert(self, loaded: str, expert: int, value_OI: Tensor) -> dict[str, Tensor]:
        """Split one matrix of a stack: a name in the files -> the part that lies there.

        Where the files also have a stack, the part belongs to its entry ``expert``.
        """
        parts = self._reverted(self._model.part(1), loaded, value_OI[None]).values()
        names = self.names_of_experts(loaded)[expert]
        matrices = [part[0] if part.ndim == 3 else part for part in parts]
        return {n: self._turned(n, m) for n, m in zip(names, matrices, strict=True)}

    def names_of_experts(self, loaded: str) -> list[list[str]]:
        """For each matrix of a stack the names in the files, in the order of the conversion."""
        if loaded not in self._by_expert:
            experts = self.shapes[loaded][0]
            numbers_E44 = torch.arange(experts, dtype=torch.float32)[:, None, None].expand(-1, 4, 4)
            names: list[list[str]] = [[] for _ in range(experts)]
            reverted = self._reverted(self._model.part(experts, 4), loaded, numbers_E44)
            for name, piece in self._named(loaded, reverted, turned=False).items():
                if piece.ndim == 3:
                    for of_expert in names:
                        of_expert.append(name)
                else:
                    names[int(piece.max())].append(name)
            self._by_expert[loaded] = names
        return self._by_expert[loaded]

    def stacked(self, name: str) -> bool:
        """Return whether the tensor of the files has a matrix for each expert."""
        return len(self._stored[name]) == 3

    def _split_tensors(self) -> set[str]:
        split = set()
        for loaded, shape in self.shapes.items():
            if loaded in self.files or not self.files:
                continue
            names = list(self._reverted(self._model, loaded, torch.empty(shape, device="meta")))
            # Several names are those of a stack that the files lack.
            stored = self._known_as(names[0], self.loaded) if len(names) == 1 else None
            if stored is not None:
                split |= {loaded, self.loaded[stored]}
                self.files[loaded] = [stored]
        return split

    def _reverted(self, model: Any, loaded: str, value: Tensor) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(model, {loaded: value})
        return reverted

    def _named(
        self, loaded: str, values: Mapping[str, Tensor], turned: bool = True
    ) -> dict[str, Tensor]:
        """``values`` under the files' names: the reverted ones may have a prefix too many."""
        files = set(self.files[loaded])
        stored_as = self._stored_as(values, files)
        pieces = {
            stored_as[name]: self._turned(stored_as[name], value) if turned else value
            for name, value in values.items()
            if name in stored_as
        }
        if pieces.keys() != files:
            raise CheckpointError(
                f"'{loaded}' is stored as {sorted(files)[:2]}, but transformers would write "
                f"{sorted(values)[:2]}; save the checkpoint again with transformers"
            )
        return pieces

    def _stored_as(self, names: Iterable[str], stored: Collection[str]) -> dict[str, str]:
        """Which one of ``stored`` each reverted name means.

        A class may write another path than it reads, such as that of a dense layer's matrices where
        the files of MoE layers have it.
        """
        pairs = {n: file for n in names if (file := self._known_as(n, stored)) is not None}
        unmatched = [name for name in names if name not in pairs]
        others = sorted(set(stored) - set(pairs.values()))
        for name in unmatched:
            ends = [o for o in others if o.split(".")[-2:] == name.split(".")[-2:]]
            same = others if len(unmatched) == len(others) == 1 else ends
            pairs |= {name: same[0]} if len(same) == 1 else {}
        return pairs

    def _known_as(self, name: str, stored: Container[str]) -> str | None:
        """The one of ``stored`` that a reverted name means: it may have a prefix too many."""
        prefix = f"{self._prefix}."
        return next(
            (n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored), None
        )

    def _turned(self, name: str, value: Tensor) -> Tensor:
        """``value`` as the files store it: transformers transposes some stacks by their shape."""
        shape = self._stored[name][-value.ndim :] if value.ndim else ()
        if value.ndim > 1 and tuple(value.mT.shape) == shape != tuple(value.shape):
            return value.mT
        return value.reshape(shape)


class _Part:
    """Stands for the model in conversions, some of which compare shapes with its parameters'."""

    def __init__(
        self,
        model: nn.Module,
        conversions: list[Any],
        experts: int | None = None,
        size: int | None = None,
    ):
        self.config, self._weight_conversions = model.config, conversions
        self._model, self._experts, self._size = model, experts, size

    def part(self, experts: int, size: int | None = None) -> "_Part":
        """The same with few experts, or small ones."""
        return _Part(self._model, self._weight_conversions, experts, size)

    def get_parameter(self, name: str) -> Tensor:
        parameter: Tensor = self._model.get_parameter(name)
        if self._experts is None:
            return parameter
        return parameter[: self._experts, : self._size, : self._size]


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


def _rows_of(piece_OI: Tensor) -> tuple[slice | Tensor, bool]:
    """Which rows a piece has, by their numbers in it, and whether it is transposed."""
    if piece_OI.ndim == 0:
        return slice(None), False
    rows = piece_OI.flatten(1) if piece_OI.ndim > 1 else piece_OI[:, None]
    transposed = bool((rows[0] != rows[0, 0]).any())
    ids = (rows[0] if transposed else rows[:, 0]).long()
    first, last = int(ids[0]), int(ids[-1]) + 1
    consecutive = torch.equal(ids, torch.arange(first, first + len(ids)))
    return (slice(first, last) if consecutive else ids), transposed


def on_meta(config: Any) -> Any:
    """The model of a checkpoint's config on the meta device, in float32."""
    with torch.device("meta"):
        return class_of(config).from_config(copy.deepcopy(config), dtype=torch.float32)
