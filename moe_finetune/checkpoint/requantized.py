"""Packed parts of changed tensors, for a merge that keeps the base's quantized format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moe_finetune.checkpoint.compute import Merged
from moe_finetune.checkpoint.files import finite
from moe_finetune.checkpoint.stored import QuantizedTensors
from moe_finetune.io.safetensors_header import TensorInfo


@dataclass
class Sums:
    """Sums over the elements of changed tensors, of float32 values before requantizing.

    Attributes:
        error: squared distance between the written values and base + adapter.
        change: squared norm of the adapter's change.
        weight: squared norm of base + adapter.
        along: inner product of the written change and the adapter's change.
    """

    error: float = 0.0
    change: float = 0.0
    weight: float = 0.0
    along: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.error + other.error,
            self.change + other.change,
            self.weight + other.weight,
            self.along + other.along,
        )


@dataclass(frozen=True)
class Requantization:
    """The error of storing the merged weights in the base's format.

    Attributes:
        format: name of the format.
        tensors: number of float tensors that were packed again.
        error: norm of (written - (base + adapter)) over the norm of (base + adapter).
        error_of_change: the same distance over the norm of the adapter's change; at 1 the written
            weights are as far off as the unchanged base.
        retained: share of the adapter's change in the written weights, as a projection.
    """

    format: str
    tensors: int
    error: float
    error_of_change: float
    retained: float

    @classmethod
    def of(cls, format: str, sums: dict[str, Sums]) -> Requantization:
        total = sum(sums.values(), Sums())

        def root_ratio(top: float, bottom: float) -> float:
            return math.sqrt(top / bottom) if bottom else 0.0

        return cls(
            format,
            len(sums),
            root_ratio(total.error, total.weight),
            root_ratio(total.error, total.change),
            total.along / total.change if total.change else 1.0,
        )

    def text(self) -> str:
        return (
            f"requantized to {self.format}: {self.tensors} tensors, {self.error:.2e} of their norm "
            f"from base + adapter, which is {self.error_of_change:.0%} of the adapter's change; "
            f"the written weights have {self.retained:.0%} of that change"
        )


@dataclass
class Requantized:
    """The bytes of one part (packed values, or scales) of ``base + sum of updates``.

    Each part is computed separately, one matrix at a time, so that no part waits in memory for
    another. Only the first part adds to the sums.

    Attributes:
        merged: the float tensor's updates.
        sums: receives the sums of the float tensor under its name.
    """

    merged: Merged
    stored: QuantizedTensors
    sums: dict[str, Sums] = field(default_factory=dict)

    def __call__(self, target: TensorInfo) -> Iterator[torch.Tensor]:
        plan = self.merged.plan
        assert plan.float_name is not None
        index = [info.name for info in self.stored.stored(plan.float_name)].index(target.name)
        matrices = plan.stacked
        all_sums = []
        for expert in range(matrices):
            part, sums = self._matrix(plan.float_name, expert, matrices, index)
            yield part.contiguous()
            all_sums.append(sums)
        if index == 0:
            self.sums[plan.float_name] = sum(all_sums, Sums())

    def _matrix(
        self, name: str, expert: int, matrices: int, part: int
    ) -> tuple[torch.Tensor, Sums]:
        """One part of the tensor's only matrix or of an expert's, and the matrix's sums."""
        merged = self.merged
        parts = self.stored.read_parts(name, expert if matrices > 1 else None)
        before_OI = self.stored.values(name, parts)
        left_OR, right_RI = merged.low_rank(expert)
        work_OI = before_OI.clone()
        merged.change(work_OI, slice(0, len(work_OI)), expert, left_OR, right_RI)
        if not finite(work_OI):
            raise merged.not_finite()
        packed = self.stored.pack(work_OI, parts)
        if part:
            return packed[part], Sums()
        after_OI = self.stored.values(name, packed)
        change_OI, written_OI = work_OI - before_OI, after_OI - before_OI
        return packed[part], Sums(
            error=(after_OI - work_OI).square().sum(dtype=torch.float64).item(),
            change=change_OI.square().sum(dtype=torch.float64).item(),
            weight=work_OI.square().sum(dtype=torch.float64).item(),
            along=(change_OI * written_OI).sum(dtype=torch.float64).item(),
        )
