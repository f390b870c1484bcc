"""The arithmetic of a merge: one tensor at a time, in float32, in pieces of a few megabytes.

Shape legend: O rows and I columns of the tensor, R the sum of its updates' ranks.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter
from moe_finetune.checkpoint.files import (
    DTYPES,
    all_finite,
    finite,
    not_finite,
    read_elements,
    read_tensor,
)
from moe_finetune.checkpoint.merge_plan import TensorPlan
from moe_finetune.checkpoint.updates import LowRank, Part, Replace
from moe_finetune.errors import CheckpointError, MoeFinetuneError, NumericsError
from moe_finetune.io.safetensors_header import FLOATS, ITEM_BYTES, TensorInfo

# Elements that a thread reads and writes at a time: one expert's whole matrix, or a part of
# lm_head. Elements computed at a time: few enough to stay in a core's own cache.
_CHUNK = 4 << 20
_BLOCK = 1 << 18
_MAX_FLOAT16 = 65504.0
_HELD = 8  # factor tensors


class Factors:
    """An adapter's factors in float32, unpacked to one contiguous pair per expert.

    Only the few most recently used tensors are cached: a layer's experts follow one another.
    """

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self._cache: OrderedDict[str, Future[Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def pair(self, part: Part) -> tuple[Tensor, Tensor]:
        """``left_OR`` (scale included) and ``right_RI`` of one part."""
        assert isinstance(part.update, LowRank)
        left_Or, right_rI = self.matrices(part.update, part.slot)
        left_Or = left_Or[part.place.rows] * part.update.scale
        return (right_rI.T, left_Or.T) if part.place.transposed else (left_Or, right_rI)

    def matrices(self, update: LowRank, slot: int = 0) -> tuple[Tensor, Tensor]:
        """``left_Or`` and ``right_rI``, whose product is the change of the model's matrix."""
        slots = len(update.experts or [0])
        unpack = _unpack_grouped if update.grouped else _unpack_b
        b_nOr = self._get(update.b, lambda t: unpack(t, slots))
        a_nrI = self._get(update.a, lambda t: t.view(slots, -1, t.shape[1]))
        left, right = b_nOr[slot], a_nrI[slot]
        return (right.T, left.T) if update.transposed else (left, right)

    def norms(self, key: str) -> Tensor:
        """DoRA's norm for each row of a matrix, (O,)."""
        return self._get(key, lambda t: t)

    def _get(self, key: str, unpack: Callable[[Tensor], Tensor]) -> Tensor:
        with self._lock:
            future = self._cache.get(key)
            mine = future is None
            if future is None:
                future = self._cache[key] = Future()
                while len(self._cache) > _HELD:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(key)
        if mine:
            try:
                info = self.adapter.tensors[key]
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
    """Content of a changed or converted tensor: ``source + sum of updates``, cast and written."""

    plan: TensorPlan
    factors: Factors

    def __call__(self, target: TensorInfo) -> Iterator[Tensor]:
        source = self.plan.source
        assert source is not None
        stacked = self.plan.stacked
        columns = target.shape[-1] if len(target.shape) > 1 else 1
        rows = target.size // ITEM_BYTES[target.dtype] // columns // stacked
        for expert in range(stacked):
            yield from self._matrix(target, source, expert, rows, columns)

    def _matrix(
        self, target: TensorInfo, source: TensorInfo, expert: int, rows: int, columns: int
    ) -> Iterator[Tensor]:
        """The tensor's only matrix, or one expert's."""
        left_OR, right_RI = self.low_rank(expert)
        # A chunk is the unit of reads and writes; a block is the part of it that fits into a cache.
        step, block = max(1, _CHUNK // columns), max(1, _BLOCK // columns)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            begin = (expert * rows + first) * columns
            chunk_OI = read_elements(source, begin, (last - first) * columns).view(-1, columns)
            out_OI = chunk_OI
            if target.dtype != source.dtype:
                out_OI = torch.empty(chunk_OI.shape, dtype=DTYPES[target.dtype])
            for top in range(0, last - first, block):
                bottom = min(top + block, last - first)
                work_OI = chunk_OI[top:bottom].to(torch.float32, copy=True)
                self.change(work_OI, slice(first + top, first + bottom), expert, left_OR, right_RI)
                _check_range(work_OI, target)
                out_OI[top:bottom] = work_OI
                if not finite(out_OI[top:bottom]):
                    raise self.not_finite()
            yield out_OI

    def change(
        self,
        work_OI: Tensor,
        rows: slice,
        expert: int,
        left_OR: Tensor | None,
        right_RI: Tensor | None,
    ) -> None:
        """Apply the updates to ``rows`` of one matrix, in place.

        Args:
            work_OI: the base's float32 values of those rows.
            left_OR, right_RI: the pair from :meth:`low_rank`.
        """
        for part in self._parts(expert):
            if isinstance(part.update, Replace):
                if not finite(work_OI):
                    raise self.not_finite()
                self._replace(work_OI, part.update, part.first + rows.start * work_OI.shape[1])
        if left_OR is None or right_RI is None:
            return
        work_OI.addmm_(left_OR[rows], right_RI)
        for part in self._parts(expert):
            if isinstance(part.update, LowRank) and part.update.magnitude:
                norms_O = self.factors.norms(part.update.magnitude)[part.place.rows][rows]
                work_OI.mul_((norms_O / work_OI.norm(dim=1))[:, None])

    def _parts(self, expert: int) -> list[Part]:
        return [part for part in self.plan.updates if part.place.expert in (None, expert)]

    def not_finite(self) -> MoeFinetuneError:
        """The error for a result that is not finite; it names the base's tensor or the adapter."""
        source = self.plan.source
        assert source is not None
        if source.dtype in FLOATS and not all_finite(source):
            return CheckpointError(not_finite(source.file, source.name))
        return NumericsError(
            f"'{source.name}' is not finite with {self.factors.adapter.folder}: its values times "
            "lora_alpha are too large; use an earlier checkpoint, or check lora_alpha in "
            "adapter_config.json"
        )

    def low_rank(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """All low-rank updates of the expert's matrix as one pair: their factors side by side."""
        pairs = [
            self.factors.pair(part)
            for part in self._parts(expert)
            if isinstance(part.update, LowRank)
        ]
        if len(pairs) < 2:
            return pairs[0] if pairs else (None, None)
        return torch.cat([left for left, _ in pairs], 1), torch.cat([right for _, right in pairs])

    def _replace(self, work_OI: Tensor, update: Replace, first: int) -> None:
        """Replace ``work_OI`` by the saved tensor's values."""
        info = self.factors.adapter.tensors[update.key]
        work_OI.copy_(read_elements(info, first, work_OI.numel()).view(work_OI.shape))


def _check_range(work_OI: Tensor, target: TensorInfo) -> None:
    if target.dtype == "F16" and work_OI.abs().max().item() > _MAX_FLOAT16:
        raise NumericsError(
            f"'{target.name}' does not fit into float16 (largest value "
            f"{work_OI.abs().max().item():.3g}); choose dtype bfloat16 or float32"
        )
