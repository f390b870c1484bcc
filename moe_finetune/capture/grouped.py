"""Products of rows grouped by expert: one kernel call on GPUs, one product an expert on CPUs.

Shape legend: S rows sorted by expert (tokens x selected), E experts, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Groups:
    """How the S = T*K (token, choice) pairs fall into experts.

    Attributes:
        slots_S: sorted row -> flat pair ``t*K + k``; stable, so it repeats exactly.
        tokens_S: sorted row -> token.
        inverse_S: flat pair -> sorted row.
        offsets_E: int32 ends of the groups in sorted rows, on the device.
        bounds: the same as Python integers with a leading 0, or None when the device computes
            groups by itself (reading them would stall the GPU's queue).
    """

    slots_S: Tensor
    tokens_S: Tensor
    inverse_S: Tensor
    offsets_E: Tensor
    bounds: list[int] | None

    @classmethod
    def of(cls, index_TK: Tensor, num_experts: int, on_device: bool) -> Groups:
        """Sort the selected experts ``index_TK`` into groups."""
        flat_S = index_TK.reshape(-1)
        slots_S = torch.argsort(flat_S, stable=True)
        inverse_S = torch.empty_like(slots_S)
        inverse_S[slots_S] = torch.arange(slots_S.numel(), device=slots_S.device)
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat_S.device)
        counts_E.scatter_add_(0, flat_S, torch.ones_like(flat_S))
        offsets_E = counts_E.cumsum(0)
        return cls(
            slots_S=slots_S,
            tokens_S=slots_S // index_TK.shape[-1],
            inverse_S=inverse_S,
            offsets_E=offsets_E.to(torch.int32),
            bounds=None if on_device else [0, *offsets_E.tolist()],
        )


def usable_on_device(*matrices: Tensor) -> bool:
    """Whether ``grouped_mm`` takes these: on a GPU, bfloat16/float16/float32, rows of 16 bytes."""
    return all(
        m.device.type == "cuda"
        and m.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (m.shape[-1] * m.element_size()) % ALIGNMENT_BYTES == 0
        and (m.shape[-2] * m.element_size()) % ALIGNMENT_BYTES == 0
        for m in matrices
    )


def rows_times_transposed(rows_SI: Tensor, weight_EOI: Tensor, groups: Groups) -> Tensor:
    """``out[s] = weight[expert(s)] @ rows[s]``, (S, O)."""
    return _rows_times(rows_SI, weight_EOI.transpose(1, 2), groups)


def rows_times(rows_SO: Tensor, weight_EOI: Tensor, groups: Groups) -> Tensor:
    """``out[s] = rows[s] @ weight[expert(s)]``, (S, I)."""
    return _rows_times(rows_SO, weight_EOI, groups)


def _rows_times(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    if groups.bounds is None:
        return grouped_mm(rows, weight, offs=groups.offsets_E)
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, (start, end) in enumerate(zip(groups.bounds, groups.bounds[1:], strict=False)):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
    return out


def outer_sums(left_SO: Tensor, right_SI: Tensor, groups: Groups) -> Tensor:
    """``out[e] = sum over the rows of e of left[s] right[s]^T``, (E, O, I): a weight's gradient."""
    if groups.bounds is None:
        return grouped_mm(left_SO.t(), right_SI, offs=groups.offsets_E)
    out = left_SO.new_zeros(len(groups.bounds) - 1, left_SO.shape[1], right_SI.shape[1])
    for expert, (start, end) in enumerate(zip(groups.bounds, groups.bounds[1:], strict=False)):
        if end > start:
            torch.mm(left_SO[start:end].t(), right_SI[start:end], out=out[expert])
    return out
