"""What an adapter changes: which tensors of the base, with which factors, and where in its files.

:mod:`moe_finetune.checkpoint.adapters.open_adapter` reads it from an adapter of any maker.

Shape legend: n experts with factors, r rank, O rows and I columns of a matrix.
"""

import threading
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from moe_finetune.checkpoint.adapters.factor_layout import vectors_of_a, vectors_of_b
from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.tensor_names import Place
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError

_CACHED = 4  # updates: a layer's experts follow one another


@dataclass(frozen=True)
class LowRank:
    """Adds ``scale * B @ A`` to a matrix, or to those of a stack, packed as PEFT packs them.

    Attributes:
        name: the tensor of the loaded model, or of the files, that it changes.
        experts: the stack's matrices that change; None for a matrix.
        transposed: the product's transpose is added, as of a class with (E, I, O).
        magnitude: the key of DoRA's norms, to which the changed matrix's rows are scaled.
    """

    name: str
    a: str
    b: str
    rank: int
    scale: float
    experts: tuple[int, ...] | None = None
    transposed: bool = False
    magnitude: str | None = None

    @property
    def key(self) -> str:
        return self.a


@dataclass(frozen=True)
class Replace:
    """Replaces the tensor ``name`` by one that trained in full, the adapter's ``key``."""

    name: str
    key: str


@dataclass(frozen=True, kw_only=True)
class OpenAdapter(Adapter):
    """An adapter of any maker over its base; :func:`peft_form` is what PEFT reads.

    ``of_files``: names are those in the base's files. ``attention_only``: its config names matrices
    of experts, of which PEFT found none.
    """

    base: Checkpoint
    low_rank: list[LowRank]
    replaced: list[Replace]
    of_files: bool = False
    attention_only: bool = False


@dataclass(frozen=True)
class Part:
    """An update's part in one tensor of the files, from its matrix ``slot``."""

    update: LowRank | Replace
    place: Place
    slot: int = 0


def parts_in_files(adapter: OpenAdapter) -> dict[str, list[Part]]:
    """The parts of each tensor in the files that changes, in the order in which they apply."""
    parts: dict[str, list[Part]] = {}
    all_updates: list[LowRank | Replace] = [*adapter.replaced, *adapter.low_rank]
    for update in all_updates:
        places = _places(update, adapter)
        saved = isinstance(update, Replace)
        experts = getattr(update, "experts", None) or range(len(places))
        for slot in experts:
            for at in places[slot]:
                if saved and (at.transposed or not isinstance(at.rows, slice)):
                    raise AdapterError(
                        f"{adapter.folder}: adapter tensor '{update.key}': the base stores "
                        f"'{at.name}' in another order than the model, and fully trained experts "
                        "cannot be merged into that; train them with LoRA"
                    )
                parts.setdefault(at.name, []).append(Part(update, at, slot))
    return parts


def _places(update: LowRank | Replace, adapter: OpenAdapter) -> list[list[Place]]:
    name, base = update.name, adapter.base
    if adapter.of_files:
        shape = base.tensors[name].shape
        return [[Place(name, e)] for e in (range(shape[0]) if len(shape) == 3 else [None])]
    if name in base.names.split:
        raise AdapterError(
            f"{adapter.folder}: adapter tensor '{update.key}': the files have this matrix and "
            f"others in one tensor, '{base.names.files[name][0]}', into which it cannot be merged; "
            "train without it"
        )
    return base.names.places(name)


class Factors:
    """An adapter's factors in float32, unpacked to one contiguous pair per expert."""

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self._unpacked = lru_cache(_CACHED)(self._unpack)
        self._lock = threading.Lock()  # threads would unpack the same update at once

    def pair(self, part: Part) -> tuple[Tensor, Tensor]:
        """``left_Or`` (scale included) and ``right_rI`` of one part."""
        assert isinstance(part.update, LowRank)
        left_Or, right_rI = self.matrices(part.update, part.slot)
        left_Or = left_Or[part.place.rows] * part.update.scale
        return (right_rI.T, left_Or.T) if part.place.transposed else (left_Or, right_rI)

    def matrices(self, update: LowRank, slot: int = 0) -> tuple[Tensor, Tensor]:
        """``left_Or`` and ``right_rI``, whose product is the change of the model's matrix."""
        with self._lock:
            a_nrI, b_nOr = self._unpacked(update)
        left, right = b_nOr[slot], a_nrI[slot]
        return (right.T, left.T) if update.transposed else (left, right)

    def _unpack(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """``a_nrI`` and ``b_nOr`` of all matrices of a stack."""
        a, b = (read_tensor(self.adapter.tensors[key]).float() for key in (update.a, update.b))
        experts = 1 if update.experts is None else a.shape[0] // update.rank
        return vectors_of_a(a, experts), vectors_of_b(b, experts).mT.contiguous()
