"""What an adapter does to a tensor of the base, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LowRank:
    """Adds ``scale * B @ A`` to a tensor.

    ``a`` and ``b`` are keys of the adapter. ``slot`` of ``slots`` is the expert's place in the
    packing; ``rows`` the range of B's rows that belong to this tensor (gate or up half), all when
    None. ``transposed``: the sum is ``(B @ A)^T``, as PEFT has it for embeddings. ``expert`` is the
    one matrix of a stack that it is added to, None for a tensor that is a matrix. ``interleaved``:
    rows of the tensor are those of B's two halves in turn. ``grouped``: B has the columns of an
    expert side by side. ``outputs_first``: A has the outputs and B the inputs, and the sum is the
    product's transposed; ``rows`` are then columns of A.
    """

    adapter: int
    a: str
    b: str
    rank: int
    scale: float
    slot: int = 0
    slots: int = 1
    rows: tuple[int, int] | None = None
    transposed: bool = False
    expert: int | None = None
    interleaved: bool = False
    grouped: bool = False
    outputs_first: bool = False


@dataclass(frozen=True)
class Replace:
    """Puts a saved tensor in place of the base's; ``first`` is its first element in the key.

    ``stacked``: the tensor holds a matrix of each expert.
    """

    adapter: int
    key: str
    first: int = 0
    stacked: bool = False


@dataclass(frozen=True)
class Magnitude:
    """DoRA: scales each row of the tensor, after the low-rank sums, to the norm that ``key`` gives.

    ``rows`` is the range of the vector that belongs to this tensor, all when None.
    """

    adapter: int
    key: str
    rows: tuple[int, int] | None = None


Update = LowRank | Replace | Magnitude
