"""DenseMixer's router gradient: the routing weight of every expert learns, not the selected ones'.

A token's output is ``y = sum_k w_k E_k(x)`` over its K selected experts, and the forward stays so.
The router's gradient is that of all E experts (Yao et al. 2025, "DenseMixer"): for an expert j that
the token did not select, ``dL/dw_j = <dL/dy, E_j(x)>`` with ``w_j = c s_j / N``. Here s are the
family's scores over all experts, N is the sum of the selected ones (1 where the family does not
normalize), which is constant for unselected experts, and c scales. Selected experts have the
gradient that they always have, N included.

Only these scalars are kept: an unselected expert runs in the backward, without a graph and without
dropout, so that experts, LoRA and inputs through the experts learn from selected tokens only.

Shape legend: T tokens, E experts, K selected ones, m drawn ones, H hidden size, D expert width.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from moe_finetune.errors import CaptureError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.models.family import Family
from moe_finetune.moe.experts.backward import Call, Saved
from moe_finetune.moe.experts.gated import gated
from moe_finetune.moe.experts.offloaded_stack import fetched

DENSE = "method.router_gradient: dense"
Draw = tuple[int, ...]
"""What a draw of experts depends on: seed, step, micro-batch; the layer and rank are added."""


@dataclass(frozen=True)
class DenseRouter:
    """How the routers of a model get the gradient of all experts.

    Attributes:
        sample: number m of unselected experts that are drawn for each token, uniformly and without
            replacement; None for all of them.
        draw: returns the part of a draw's key that changes with every forward.
    """

    sample: int | None = None
    draw: Callable[[], Draw] = lambda: ()


@dataclass(frozen=True)
class Draws:
    """Which unselected experts run: ``sample`` a token, drawn by ``key``; all without a number."""

    sample: int | None = None
    key: Draw = ()


@dataclass(frozen=True)
class DenseScores:
    """One layer's weights (T, E) that unselected experts would have, with their graph."""

    weights_TE: Tensor
    draws: Draws = field(default_factory=Draws)


def check_dense(family: Family, facts: ModelFacts, sample: int | None) -> None:
    """Refuse a model whose routing weights are not its scores, and a draw of too many experts."""
    if family.own_weights and not family.proportional:
        raise CaptureError(
            f"{DENSE}: {family.title} is not supported: {family.own_weights}, so an unselected "
            "expert has no weight; set router_gradient: selected"
        )
    unselected = facts.num_experts - facts.top_k
    if sample is not None and not 1 <= sample <= unselected:
        raise CaptureError(
            f"method.dense_sample: {sample} experts of the {unselected} that a token does not "
            f"select; give 1 to {unselected}, or leave it out for all"
        )


def unselected_gradient(
    saved: Saved,
    call: Call,
    dout_TH: Tensor,
    draws: Draws,
    outputs: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """``<dL/dy_t, E_j(x_t)>`` (T, E) of each expert that a token did not select, else 0.

    Args:
        saved: what the experts' forward saved.
        dout_TH: gradient of the experts' combined output, in their dtype.
        outputs: runs the experts ``index_Tm`` on some tokens and returns (T, m, H).
    """
    selected_TE = _selected(saved, call.num_experts)
    wide = torch.promote_types(dout_TH.dtype, torch.float32)
    if draws.sample is not None:
        index_Tm = _drawn(selected_TE, draws)
        products_Tm = torch.cat([
            (outputs(rows, index_Tm[rows]).to(wide) * dout_TH[rows, None].to(wide)).sum(-1)
            for rows in torch.arange(len(index_Tm), device=index_Tm.device).split(
                max(1, saved.slots_S.numel() // draws.sample)  # no more pairs than the forward
            )
        ])  # fmt: skip
        unselected = call.num_experts - saved.weights_TK.shape[1]
        grad_TE = dout_TH.new_zeros(selected_TE.shape, dtype=wide)
        return grad_TE.scatter_(1, index_Tm, products_Tm * (unselected / draws.sample))
    grad_TE = dout_TH.new_empty(selected_TE.shape, dtype=wide)
    for expert, output_TH in enumerate(_outputs_of_each(saved, call)):
        grad_TE[:, expert] = output_TH.to(wide).mul_(dout_TH).sum(-1)
    return grad_TE.masked_fill_(selected_TE, 0.0)


def _selected(saved: Saved, num_experts: int) -> Tensor:
    """Bool (T, E), from the groups of the forward: tensors that a recomputation saves again."""
    rows_S = torch.arange(saved.slots_S.numel(), device=saved.slots_S.device)
    expert_S = torch.searchsorted(saved.offsets_E, rows_S, right=True)
    tokens, top_k = saved.weights_TK.shape
    selected_TE = torch.zeros(tokens, num_experts, dtype=torch.bool, device=rows_S.device)
    selected_TE[saved.slots_S // top_k, expert_S] = True
    return selected_TE


def _drawn(selected_TE: Tensor, draws: Draws) -> Tensor:
    """m unselected experts (T, m) of each token, from a generator that nothing else reads."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    digest = hashlib.sha256(repr((*draws.key, rank)).encode()).digest()
    generator = torch.Generator(selected_TE.device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    keys_TE = torch.rand(selected_TE.shape, generator=generator, device=selected_TE.device)
    assert draws.sample is not None
    return keys_TE.masked_fill(selected_TE, -1.0).topk(draws.sample, dim=-1).indices


def _outputs_of_each(saved: Saved, call: Call) -> Iterator[Tensor]:
    """Yield every expert's output (T, H) on all tokens; one quantized matrix is decoded at a time.

    All tokens, also those that selected it: their rows need no gathering, and K of E are few.
    """
    x_TH = saved.hidden_TH
    up_EH2D = fetched(saved.gate_up_E2DH.transpose(1, 2))
    down_EDH = fetched(saved.down_EHD.transpose(1, 2))
    for expert in range(call.num_experts):
        rows_T2D = x_TH @ up_EH2D[expert]
        if saved.bias_up_E2D is not None:
            rows_T2D += saved.bias_up_E2D[expert]
        if saved.a_up_ErH is not None and saved.b_up_E2Dr is not None:
            low_Tr = x_TH @ _of_expert(saved.a_up_ErH, expert).T
            rows_T2D.addmm_(low_Tr, saved.b_up_E2Dr[expert].T, alpha=call.scaling_up)
        z_TD = gated(rows_T2D, call.activation)
        y_TH = z_TD @ down_EDH[expert]
        if saved.bias_down_EH is not None:
            y_TH += saved.bias_down_EH[expert]
        if saved.a_down_ErD is not None and saved.b_down_EHr is not None:
            low_Tr = z_TD @ saved.a_down_ErD[expert].T
            y_TH.addmm_(low_Tr, _of_expert(saved.b_down_EHr, expert).T, alpha=call.scaling_down)
        yield y_TH


def _of_expert(factor: Tensor, expert: int) -> Tensor:
    """A LoRA factor's matrix of one expert, which may be the one of all."""
    return factor if factor.ndim == 2 else factor[expert]
