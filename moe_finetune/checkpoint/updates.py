"""The updates that an adapter makes to tensors of the base, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LowRank:
    """Adds ``scale * B @ A`` to a tensor.

    ``a`` and ``b`` are keys of the adapter. ``slot`` of ``slots`` is the expert's place in the
    packing; ``rows`` is the range of B's rows that belong to this tensor (gate or up half), None
    for all. ``transposed``: ``(B @ A)^T`` is added, as in PEFT for embeddings. ``expert`` is the
    index of the changed matrix in a stack, None for a tensor that is a matrix. ``interleaved``: the
    tensor's rows alternate between B's two halves. ``grouped``: B has an expert's columns side by
    side. ``outputs_first``: A has the outputs and B the inputs, and the product's transpose is
    added; ``rows`` are then columns of A.
    """

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
    """Replaces the base's tensor by a saved one, which begins at element ``first`` of the key.

    ``stacked``: the tensor has a matrix for each expert.
    """

    key: str
    first: int = 0
    stacked: bool = False


@dataclass(frozen=True)
class Magnitude:
    """DoRA: scales each row of the tensor to the norm in ``key``, after the low-rank sums.

    ``rows`` is the range of the vector that belongs to this tensor, None for all.
    """

    key: str
    rows: tuple[int, int] | None = None


Update = LowRank | Replace | Magnitude
