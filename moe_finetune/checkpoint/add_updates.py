"""The arithmetic of a merge: one tensor at a time, in float32, in pieces of a few megabytes.

Shape legend: O rows and I columns of the tensor, R the sum of the updates' ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.updates import Factors, LowRank, Part, Replace
from moe_finetune.checkpoint.dequantized_tensors import QuantizedTensors
from moe_finetune.checkpoint.weight_files import (
    DTYPES,
    all_finite,
    finite,
    not_finite,
    read_elements,
    read_tensor,
)
from moe_finetune.errors import CheckpointError, MoeFinetuneError, NumericsError
from moe_finetune.io.safetensors_header import FLOATS, TensorInfo

# Elements that a thread computes at a time: few enough to stay in a core's own cache.
_CHUNK = 1 << 18
_MAX_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Merged:
    """Content of a changed or converted tensor: its source, decoded, + updates, rounded once."""

    source: TensorInfo
    parts: tuple[Part, ...]
    factors: Factors
    stored: QuantizedTensors | None = None

    @property
    def matrices(self) -> int:
        """Number of stacked expert matrices in the tensor; 1 for a single matrix."""
        in_stack = any(part.place.expert is not None for part in self.parts)
        decoded_stack = self.stored is not None and len(self.source.shape) == 3
        return self.source.shape[0] if in_stack or decoded_stack else 1

    def __call__(self, target: TensorInfo) -> Iterator[Tensor]:
        source, columns = self.source, target.shape[-1] if len(target.shape) > 1 else 1
        rows = math.prod(target.shape) // columns // self.matrices
        step = max(1, _CHUNK // columns)
        for expert in range(self.matrices):
            pair, decoded_OI = self.low_rank(expert), self._decoded(expert)
            for first in range(0, rows, step):
                last = min(first + step, rows)
                begin = (expert * rows + first) * columns
                if decoded_OI is None:
                    values_OI = read_elements(source, begin, (last - first) * columns)
                    exact_OI = values_OI.view(-1, columns).to(torch.float32, copy=True)
                else:
                    exact_OI = decoded_OI[first:last].clone()
                self.change(exact_OI, slice(first, last), expert, pair)
                _check_range(exact_OI, target)
                rounded_OI = exact_OI.to(DTYPES[target.dtype])
                if not finite(rounded_OI):
                    raise self.not_finite()
                yield rounded_OI

    def _decoded(self, expert: int) -> Tensor | None:
        if self.stored is None:
            return None
        return self.stored.read(self.source.name, expert if self.matrices > 1 else None)

    def change(
        self, work_OI: Tensor, rows: slice, expert: int, pair: tuple[Tensor, Tensor] | None
    ) -> None:
        """Apply the updates to the base's float32 values of ``rows`` of one matrix, in place."""
        parts = self._parts(expert)
        for part in parts:
            if isinstance(part.update, Replace):
                if not finite(work_OI):
                    raise self.not_finite()
                info = self.factors.adapter.tensors[part.update.key]
                assert isinstance(part.place.rows, slice)  # see parts_in_files
                start = (part.place.rows.start or 0) + rows.start
                first = part.slot * math.prod(info.shape[1:]) + start * work_OI.shape[1]
                work_OI.copy_(read_elements(info, first, work_OI.numel()).view(work_OI.shape))
        if pair is None:
            return
        left_OR, right_RI = pair
        work_OI.addmm_(left_OR[rows], right_RI)
        for part in parts:
            if isinstance(part.update, LowRank) and part.update.magnitude:
                norms_O = read_tensor(self.factors.adapter.tensors[part.update.magnitude]).float()
                norms_O = norms_O[part.place.rows][rows]
                work_OI.mul_((norms_O / work_OI.norm(dim=1))[:, None])

    def _parts(self, expert: int) -> list[Part]:
        return [part for part in self.parts if part.place.expert in (None, expert)]

    def low_rank(self, expert: int) -> tuple[Tensor, Tensor] | None:
        """All low-rank updates of the expert's matrix as one pair: their factors side by side."""
        parts = [part for part in self._parts(expert) if isinstance(part.update, LowRank)]
        if not parts:
            return None
        lefts, rights = zip(*(self.factors.pair(part) for part in parts), strict=True)
        return (torch.cat(lefts, 1), torch.cat(rights)) if len(parts) > 1 else (lefts[0], rights[0])

    def not_finite(self) -> MoeFinetuneError:
        """The error for a result that is not finite; it names the base's tensor or the adapter."""
        source = self.source
        if self.stored is None and source.dtype in FLOATS and not all_finite(source):
            return CheckpointError(not_finite(source.file, source.name))
        return NumericsError(
            f"'{source.name}' is not finite with {self.factors.adapter.folder}: its values times "
            "lora_alpha are too large; use an earlier checkpoint, or check lora_alpha in "
            "adapter_config.json"
        )


def _check_range(work_OI: Tensor, target: TensorInfo) -> None:
    if target.dtype == "F16" and work_OI.abs().max().item() > _MAX_FLOAT16:
        raise NumericsError(
            f"'{target.name}' does not fit into float16 (largest value "
            f"{work_OI.abs().max().item():.3g}); choose dtype bfloat16 or float32"
        )
