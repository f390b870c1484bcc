"""Products of rows grouped by expert: one kernel call on GPUs, one product per expert on CPUs.

Quantized stacks are dequantized ``DEQUANTIZED_BYTES`` at a time: the kernel then runs once for
every few experts with tokens. The host must know the group sizes, which costs one read of E numbers
per layer and forward (the backward reuses them).

Shape legend: S rows sorted by expert (tokens x selected), P rows of a part, E experts, C experts of
a part, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from moe_finetune.errors import CaptureError
from moe_finetune.moe.experts.offloaded_stack import fetched
from moe_finetune.quantization.weight import QuantizedWeight

Kernel = Literal["auto", "grouped", "loop"]
ALIGNMENT_BYTES = 16
PART_BYTES = 2**22
DEQUANTIZED_BYTES = 2**27
"""Largest part of a quantized stack that is dequantized at a time, but at least one expert."""


@dataclass(frozen=True)
class Part:
    """The rows of some consecutive experts.

    Attributes:
        rows: their slice of the sorted rows.
        slots_P: flat pair ``t*K + k`` of each row.
        tokens_P: token of each row.
        experts: a slice, int64 numbers on the device, or None for all experts.
        sizes: number of rows of each expert; empty if the kernel reads ``offsets_C``.
        offsets_C: int32 ends of the groups within the part's rows, for the grouped kernel; None
            with one product per expert.
    """

    rows: slice
    slots_P: Tensor
    tokens_P: Tensor
    experts: slice | Tensor | None
    sizes: list[int]
    offsets_C: Tensor | None

    def split(self, rows_PX: Tensor) -> tuple[Tensor, ...]:
        return rows_PX.split(self.sizes)


@dataclass(frozen=True)
class Groups:
    """The S = T*K (token, choice) pairs grouped by expert.

    Attributes:
        slots_S: flat pair ``t*K + k`` of each sorted row; the sort is stable, so deterministic.
        tokens_S: token of each sorted row.
        offsets_E: int32 ends of the groups in sorted rows, on the device.
        bounds: the same as Python integers with a leading 0, or None if only the device knows the
            groups (reading them would make the GPU wait).
        grouped: whether each part is one call of the grouped kernel.

    A backward rebuilds its groups by :meth:`saved` and :meth:`restored`: everything that depends on
    the selection must pass ``save_for_backward``, which gives a checkpointed layer's backward the
    tensors of its recomputation. Kept in another way, they would be those of the first visit, while
    rows are of the second, and one other selected expert would shift all rows after it.
    """

    slots_S: Tensor
    tokens_S: Tensor
    offsets_E: Tensor
    bounds: list[int] | None
    grouped: bool

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int, grouped: bool, in_chunks: bool) -> Groups:
        """Group pairs by expert; with ``in_chunks`` the kernel gets a few experts at a time."""
        flat_S = index_TK.reshape(-1)
        slots_S = torch.argsort(flat_S, stable=True)
        # Integers, whose sum does not depend on the order; bincount would make the GPU wait.
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat_S.device)
        counts_E.scatter_add_(0, flat_S, torch.ones_like(flat_S))
        offsets_E = counts_E.cumsum(0)
        return cls(
            slots_S=slots_S,
            tokens_S=slots_S // index_TK.shape[-1],
            offsets_E=offsets_E.to(torch.int32),
            bounds=None if grouped and not in_chunks else [0, *offsets_E.tolist()],
            grouped=grouped,
        )

    def saved(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What :meth:`restored` reads: ``slots_S``, ``offsets_E`` and the bounds, on the host."""
        bounds = None if self.bounds is None else torch.tensor(self.bounds)
        return self.slots_S, self.offsets_E, bounds

    @classmethod
    def restored(
        cls, slots_S: Tensor, offsets_E: Tensor, bounds: Tensor | None, top_k: int, grouped: bool
    ) -> Groups:
        numbers = None if bounds is None else bounds.tolist()
        return cls(slots_S, slots_S // top_k, offsets_E, numbers, grouped)

    def parts(self, row_bytes: int, matrix_bytes: int) -> list[Part]:
        """The experts to process at a time.

        All if only the device knows the groups. Of quantized ones as many matrices of
        ``matrix_bytes`` as fit into ``DEQUANTIZED_BYTES``; otherwise about 4 MiB of rows of
        ``row_bytes``, so that the next product reads them from the cache. No part is empty, unless
        there are no rows.
        """
        if self.bounds is None:
            rows = slice(0, self.slots_S.numel())
            return [Part(rows, self.slots_S, self.tokens_S, None, [], self.offsets_E)]
        if self.grouped:
            return self._chunks(self.bounds, max(1, DEQUANTIZED_BYTES // matrix_bytes))
        limit = max(1, PART_BYTES // row_bytes)
        experts = len(self.bounds) - 1
        parts: list[Part] = []
        first = 0
        for last in range(1, experts + 1):
            if last < experts:
                begin = self.bounds[first]
                middle = self.bounds[last]
                end = self.bounds[last + 1]
                if not begin < middle < end or end - begin <= limit:
                    continue
            parts.append(self._part(self.bounds[first : last + 1], slice(first, last)))
            first = last
        return parts

    def _part(self, bounds: list[int], experts: slice) -> Part:
        rows = slice(bounds[0], bounds[-1])
        sizes = [end - start for start, end in pairwise(bounds)]
        return Part(rows, self.slots_S[rows], self.tokens_S[rows], experts, sizes, None)

    def _chunks(self, bounds: list[int], size: int) -> list[Part]:
        """Parts of ``size`` experts each, without experts that have no rows."""
        counts_E = self.offsets_E.diff(prepend=self.offsets_E.new_zeros(1))
        # Experts with rows first, in their order: as many as the bounds say.
        ids_E = torch.argsort(counts_E == 0, stable=True)
        ends = [end for start, end in pairwise(bounds) if end > start] or [0]
        parts, begin = [], 0
        for first in range(0, len(ends), size):
            chosen = slice(first, first + size)
            ids_C, end = ids_E[chosen][: len(ends) - first], ends[chosen][-1]
            rows = slice(begin, end)
            offsets_C = self.offsets_E[ids_C] - begin
            parts.append(Part(rows, self.slots_S[rows], self.tokens_S[rows], ids_C, [], offsets_C))
            begin = end
        return parts

    def inverse(self) -> Tensor:
        """The sorted row of each flat pair ``t*K + k``."""
        inverse_S = torch.empty_like(self.slots_S)
        inverse_S[self.slots_S] = torch.arange(inverse_S.numel(), device=inverse_S.device)
        return inverse_S

    def buffer(self, width: int, like: Tensor) -> Tensor | None:
        """Memory (S, width) for the parts' products, passed to them as ``out``.

        None if one product covers all rows.
        """
        if self.bounds is None:
            return None
        return like.new_empty(self.slots_S.numel(), width)


def grouped_products(kernel: Kernel, *matrices: Tensor) -> bool:
    """Whether products with these matrices run as one call; ``auto`` does so on GPUs."""
    if kernel not in get_args(Kernel):
        raise CaptureError(f"kernel is '{kernel}', expected one of {', '.join(get_args(Kernel))}")
    if kernel == "loop" or (kernel == "auto" and matrices[0].device.type != "cuda"):
        return False
    refused = next((m for m in matrices if not _aligned(m)), None)
    if refused is not None and kernel == "grouped":
        raise CaptureError(
            f"experts of shape {tuple(refused.shape)} and dtype {refused.dtype} cannot use the "
            "grouped kernel, which needs bfloat16, float16 or float32 and widths that are "
            f"multiples of {ALIGNMENT_BYTES} bytes; use kernel 'auto' or 'loop'"
        )
    return refused is None


def _aligned(matrix: Tensor) -> bool:
    return matrix.dtype in (torch.bfloat16, torch.float16, torch.float32) and all(
        width * matrix.element_size() % ALIGNMENT_BYTES == 0 for width in matrix.shape[-2:]
    )


def rows_times(
    rows_PI: Tensor, weight_EIO: Tensor, part: Part, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """``result[p] = scale * rows[p] @ weight[expert(p)]``, (P, O).

    A ``weight`` (I, O) is that of all experts. ``out``: a buffer for all sorted rows; the part's
    rows are filled and returned.
    """
    shared = weight_EIO.ndim == 2
    if part.offsets_C is not None and not shared:
        product = grouped_mm(rows_PI, _stack(weight_EIO, part), offs=part.offsets_C)
        if scale != 1.0:
            product.mul_(scale)
        return product if out is None else out[part.rows].copy_(product)
    if out is None:
        result_PO = rows_PI.new_empty(rows_PI.shape[0], weight_EIO.shape[-1])
    else:
        result_PO = out[part.rows]
    if shared:
        _product(rows_PI, weight_EIO, scale, out=result_PO)
        return result_PO
    triples = zip(
        part.split(result_PO), part.split(rows_PI), _matrices(weight_EIO, part), strict=True
    )
    for into, rows, matrix in triples:
        _product(rows, matrix, scale, out=into)
    return result_PO


def add_rows_times(
    into_PO: Tensor, rows_PI: Tensor, weight_EIO: Tensor, part: Part, scale: float = 1.0
) -> None:
    """``into[p] += scale * rows[p] @ weight[expert(p)]``, in place; as :func:`rows_times`."""
    if weight_EIO.ndim == 2:
        into_PO.addmm_(rows_PI, weight_EIO, alpha=scale)
        return
    if part.offsets_C is not None:
        product = grouped_mm(rows_PI, _stack(weight_EIO, part), offs=part.offsets_C)
        into_PO.add_(product, alpha=scale)
        return
    matrices = _matrices(weight_EIO, part)
    for into, rows, matrix in zip(part.split(into_PO), part.split(rows_PI), matrices, strict=True):
        into.addmm_(rows, matrix, alpha=scale)


def _stack(weight_EIO: Tensor, part: Part) -> Tensor:
    """The weights ``(C, I, O)`` of a part's experts; only these are dequantized."""
    weight_EIO = fetched(weight_EIO)
    return weight_EIO if part.experts is None else weight_EIO[part.experts]


def _matrices(weight: Tensor, part: Part) -> Iterator[Tensor]:
    """Yield the matrices of the part's experts; each quantized one is dequantized when reached."""
    weight = fetched(weight)
    assert isinstance(part.experts, slice)
    if not isinstance(weight, QuantizedWeight):
        yield from weight[part.experts].unbind(0)
        return
    unused = torch.empty(weight.shape[1:], dtype=weight.dtype, device=weight.device)
    for expert, rows in zip(range(part.experts.start, part.experts.stop), part.sizes, strict=True):
        yield weight[expert] if rows else unused


def _product(rows: Tensor, right: Tensor, scale: float, out: Tensor) -> None:
    """``out = scale * left @ right``."""
    if scale == 1.0:
        torch.mm(rows, right, out=out)
    else:
        out.addmm_(rows, right, beta=0, alpha=scale)


class OuterSums:
    """``sums[e] = scale * sum over the rows of e of left[p] right[p]^T``: a weight's gradient.

    Filled part by part; the sum over no rows is 0. The result is None without a weight. A weight
    (O, I) that all experts share has one sum, over all rows.
    """

    def __init__(self, like_EOI: Tensor | None, groups: Groups, scale: float = 1.0):
        self.scale = scale
        self.sums_EOI: Tensor | None = None
        self.shared = like_EOI is not None and like_EOI.ndim == 2
        if self.shared and like_EOI is not None:
            # Parts add up, which 16 bits would round each time.
            wide = torch.promote_types(like_EOI.dtype, torch.float32)
            self.sums_EOI = torch.zeros_like(like_EOI, dtype=wide)
        elif groups.bounds is not None and like_EOI is not None:
            # A loop writes every expert's sum, also over no rows; chunks leave such experts out.
            make = torch.zeros_like if groups.grouped else torch.empty_like
            self.sums_EOI = make(like_EOI, memory_format=torch.contiguous_format)

    def add(self, left_PO: Tensor, right_PI: Tensor, part: Part) -> None:
        """Add the rows of ``part``; call once per part."""
        if self.shared:
            assert self.sums_EOI is not None
            self.sums_EOI.add_(left_PO.t() @ right_PI, alpha=self.scale)
            return
        if part.offsets_C is not None:
            sums_COI = grouped_mm(left_PO.t(), right_PI, offs=part.offsets_C)
            if self.scale != 1.0:
                sums_COI.mul_(self.scale)
            if isinstance(part.experts, Tensor):
                assert self.sums_EOI is not None
                self.sums_EOI.index_copy_(0, part.experts, sums_COI)
            else:
                self.sums_EOI = sums_COI
            return
        assert self.sums_EOI is not None
        sums = self.sums_EOI[part.experts].unbind(0)
        for into, left, right in zip(sums, part.split(left_PO), part.split(right_PI), strict=True):
            _product(left.t(), right, self.scale, out=into)

    def result(self) -> Tensor | None:
        """The sums (E, O, I), or (O, I)."""
        return self.sums_EOI


class RowSums:
    """``sums[e] = sum over the rows of e``: a bias's gradient, in a fixed order."""

    def __init__(self, like_EO: Tensor | None, groups: Groups):
        # As a product with ones, which both kernels have; as many of them as their rows need.
        like_EOI = None if like_EO is None else like_EO.unsqueeze(2).expand(-1, -1, ALIGNMENT_BYTES)
        self.outer = OuterSums(like_EOI, groups)

    def add(self, rows_PO: Tensor, part: Part) -> None:
        """Add the rows of ``part``; call once per part."""
        self.outer.add(rows_PO, rows_PO.new_ones(rows_PO.shape[0], ALIGNMENT_BYTES), part)

    def result(self) -> Tensor | None:
        sums_EOI = self.outer.sums_EOI
        return None if sums_EOI is None else sums_EOI[:, :, 0]
