"""The arithmetic of a merge: one tensor at a time, in float32, in pieces of a few megabytes.

Shape legend: O rows and I columns of the tensor, R the sum of its updates' ranks.
"""

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter
from moe_finetune.checkpoint.merge_plan import TensorPlan
from moe_finetune.checkpoint.tensors import (
    as_bytes,
    read_bytes,
    read_into,
    read_tensor,
    thread_buffer,
    typed,
)
from moe_finetune.checkpoint.updates import LowRank, Magnitude, Replace
from moe_finetune.checkpoint.values import all_finite, finite, not_finite
from moe_finetune.checkpoint.writer import Output
from moe_finetune.errors import CheckpointError, MoeFinetuneError, NumericsError
from moe_finetune.io.safetensors_header import FLOATS, ITEM_BYTES, TensorInfo

# Elements that a thread reads and writes at a time: one expert's whole matrix, or a part of
# lm_head. Elements computed at a time: few enough to stay in a core's own cache.
_CHUNK = 4 << 20
_BLOCK = 1 << 18
_MAX_FLOAT16 = 65504.0
_HELD = 8  # factor tensors


class Factors:
    """Factors of the adapters in float32, unpacked to one contiguous pair per expert.

    Only the few most recently used tensors are cached: a layer's experts follow one another.
    """

    def __init__(self, adapters: tuple[tuple[Adapter, float], ...]):
        self.adapters = adapters
        self._cache: OrderedDict[tuple[int, str], Future[Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def pair(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """``left_OR`` (weight and scale included) and ``right_RI`` of one update."""
        left_Or, right_rI = self.matrices(update)
        if update.interleaved:
            left_Or = left_Or.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        if update.transposed:
            left_Or, right_rI = right_rI.T, left_Or.T
        if update.rows:
            left_Or = left_Or[slice(*update.rows)]
        return left_Or * (update.scale * self.adapters[update.adapter][1]), right_rI

    def matrices(self, update: LowRank) -> tuple[Tensor, Tensor]:
        """``left_Or`` and ``right_rI``, whose product is the change of the model's matrix."""
        unpack = _unpack_grouped if update.grouped else _unpack_b
        b_nOr = self._get(update.adapter, update.b, lambda t: unpack(t, update.slots))
        a_nrI = self._get(update.adapter, update.a, lambda t: t.view(update.slots, -1, t.shape[1]))
        left, right = b_nOr[update.slot], a_nrI[update.slot]
        return (right.T, left.T) if update.outputs_first else (left, right)

    def norms(self, update: Magnitude) -> Tensor:
        """DoRA's norm for each row of the tensor, (O,)."""
        norms_O = self._get(update.adapter, update.key, lambda t: t)
        return norms_O[slice(*update.rows)] if update.rows else norms_O

    def _get(self, adapter: int, key: str, unpack) -> Tensor:
        with self._lock:
            future = self._cache.get((adapter, key))
            mine = future is None
            if future is None:
                future = self._cache[adapter, key] = Future()
                while len(self._cache) > _HELD:
                    self._cache.popitem(last=False)
            self._cache.move_to_end((adapter, key))
        if mine:
            try:
                info = self.adapters[adapter][0].tensors[key]
                future.set_result(unpack(read_tensor(info).float()).contiguous())
            except BaseException as problem:
                future.set_exception(problem)
        return future.result()


def _unpack_b(packed_ORn: Tensor, slots: int) -> Tensor:
    """Unpack ``lora_B`` (O, r·n), the expert index fastest, to (n, O, r)."""
    return packed_ORn.view(packed_ORn.shape[0], -1, slots).permute(2, 0, 1)


def _unpack_grouped(packed_OnR: Tensor, slots: int) -> Tensor:
    """Unpack ``lora_B`` (O, n·r), the expert index slowest, to (n, O, r)."""
    return packed_OnR.view(packed_OnR.shape[0], slots, -1).transpose(0, 1)


@dataclass
class Merged:
    """Content of a changed or converted tensor: ``source + sum of updates``, cast and written.

    ``norms`` receives the Frobenius norm of the float32 change under the tensor's name, and for an
    expert stack also each expert's under ``name[expert]``.
    """

    plan: TensorPlan
    factors: Factors
    norms: dict[str, float] = field(default_factory=dict)

    def write(self, out: Output, target: TensorInfo) -> None:
        source = self.plan.source
        assert source is not None
        stacked = self.plan.stacked
        columns = target.shape[-1] if len(target.shape) > 1 else 1
        rows = target.size // ITEM_BYTES[target.dtype] // columns // stacked
        file = os.open(source.file, os.O_RDONLY)
        try:
            changes = [
                self._matrix(out, target, source, file, expert, rows, columns)
                for expert in range(stacked)
            ]
        finally:
            os.close(file)
        if self.plan.updates:
            if stacked > 1:
                for expert, squares in enumerate(changes):
                    self.norms[f"{target.name}[{expert}]"] = squares**0.5
            self.norms[target.name] = sum(changes) ** 0.5

    def _matrix(
        self,
        out: Output,
        target: TensorInfo,
        source: TensorInfo,
        file: int,
        expert: int,
        rows: int,
        columns: int,
    ) -> float:
        """Write the tensor's only matrix, or one expert's; return its change's squared norm."""
        left_OR, right_RI = self.low_rank(expert)
        squares = 0.0
        # A chunk is the unit of reads and writes; a block is the part of it that fits into a cache.
        start_row, step, block = expert * rows, max(1, _CHUNK // columns), max(1, _BLOCK // columns)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            begin = (start_row + first) * columns
            at = target.offset + begin * ITEM_BYTES[target.dtype]
            chunk_OI = _buffer("in", last - first, columns, source.dtype, at)
            start = source.offset + begin * ITEM_BYTES[source.dtype]
            read_into(file, as_bytes(chunk_OI), start)
            out_OI = chunk_OI
            if target.dtype != source.dtype:
                out_OI = _buffer("out", last - first, columns, target.dtype, at)
            for top in range(0, last - first, block):
                rows_here = slice(top, min(top + block, last - first))
                work_OI = _buffer("work", rows_here.stop - top, columns, "F32")
                work_OI.copy_(chunk_OI[rows_here])
                matrix_rows = slice(first + rows_here.start, first + rows_here.stop)
                at_element = begin + top * columns
                squares += self.change(work_OI, matrix_rows, at_element, left_OR, right_RI)
                _check_range(work_OI, target)
                out_OI[rows_here].copy_(work_OI)
                if not finite(out_OI[rows_here]):
                    raise self.not_finite()
            out.write(out_OI.view(-1).view(torch.uint8), at)
        if left_OR is not None and right_RI is not None and self._magnitude is None:
            # ||L R||^2 = sum((L^T L) * (R R^T)): the product itself is never needed.
            gram = (left_OR.T @ left_OR).double() * (right_RI @ right_RI.T).double()
            squares += max(gram.sum().item(), 0.0)
        return squares

    def change(
        self,
        work_OI: Tensor,
        rows: slice,
        first: int,
        left_OR: Tensor | None,
        right_RI: Tensor | None,
    ) -> float:
        """Apply the updates to ``rows`` of one matrix, in place.

        Args:
            work_OI: the base's float32 values of those rows.
            first: index of their first element in the flattened tensor.
            left_OR, right_RI: the pair from :meth:`low_rank`.

        Returns:
            the squared norm of the change; low-rank updates count only if a DoRA update follows.
        """
        squares = 0.0
        for update in self.plan.updates:
            if isinstance(update, Replace):
                if not finite(work_OI):
                    raise self.not_finite()
                squares += self._replace(work_OI, update, first)
        if left_OR is None or right_RI is None:
            return squares
        magnitude = self._magnitude
        before_OI = work_OI.clone() if magnitude else None
        work_OI.addmm_(left_OR[rows], right_RI)
        if magnitude and before_OI is not None:
            norms_O = self.factors.norms(magnitude)[rows]
            work_OI.mul_((norms_O / work_OI.norm(dim=1))[:, None])
            squares += (work_OI - before_OI).square().sum().item()
        return squares

    @property
    def _magnitude(self) -> Magnitude | None:
        return next((u for u in self.plan.updates if isinstance(u, Magnitude)), None)

    def not_finite(self) -> MoeFinetuneError:
        """The error for a result that is not finite; it names the base's tensor or the adapters."""
        source = self.plan.source
        assert source is not None
        if source.dtype in FLOATS and not all_finite(source):
            return CheckpointError(not_finite(source.file, source.name))
        folders = ", ".join(str(adapter.folder) for adapter, _ in self.factors.adapters)
        return NumericsError(
            f"'{source.name}' is not finite with {folders or 'this dtype'}: its values times "
            "lora_alpha are too large; use an earlier checkpoint, or check lora_alpha in "
            "adapter_config.json"
        )

    def low_rank(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """All low-rank updates of the expert's matrix as one pair: their factors side by side."""
        pairs = [
            self.factors.pair(update)
            for update in self.plan.updates
            if isinstance(update, LowRank) and update.expert in (None, expert)
        ]
        if len(pairs) < 2:
            return pairs[0] if pairs else (None, None)
        return torch.cat([left for left, _ in pairs], 1), torch.cat([right for _, right in pairs])

    def _replace(self, work_OI: Tensor, update: Replace, first: int) -> float:
        """Move ``work_OI`` toward the saved tensor by the adapter's weight; square of the move."""
        adapter, weight = self.factors.adapters[update.adapter]
        info, count = adapter.tensors[update.key], work_OI.numel()
        size = ITEM_BYTES[info.dtype]
        raw = read_bytes(info.file, info.offset + (update.first + first) * size, count * size)
        new_OI = typed(raw, info.dtype).view(work_OI.shape).float()
        move_OI = new_OI - work_OI
        if weight == 1.0 and sum(isinstance(u, Replace) for u in self.plan.updates) == 1:
            work_OI.copy_(new_OI)
        else:
            work_OI.add_(move_OI, alpha=weight)
        return (weight * move_OI.norm().item()) ** 2


def _buffer(name: str, rows: int, columns: int, dtype: str, offset: int = 0) -> Tensor:
    """This thread's buffer as (rows, columns) of a stored dtype, to be written at ``offset``."""
    item = ITEM_BYTES[dtype]
    # Rounded down to whole items; other offsets are written buffered anyway.
    raw = thread_buffer(name, rows * columns * item, offset - offset % item)
    return typed(raw, dtype).view(rows, columns)


def _check_range(work_OI: Tensor, target: TensorInfo) -> None:
    if target.dtype == "F16" and work_OI.abs().max().item() > _MAX_FLOAT16:
        raise NumericsError(
            f"'{target.name}' does not fit into float16 (largest value "
            f"{work_OI.abs().max().item():.3g}); choose dtype bfloat16 or float32"
        )
