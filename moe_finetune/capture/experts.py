"""The routed experts' forward: LoRA beside the frozen stack, never added into it.

Steps, for T tokens that select K of E experts each (S = T*K rows sorted by expert):

1. rows ``x_SH`` of each expert are gathered from the input;
2. ``gate_up = x W^T + s (drop(x) A^T) B^T`` with grouped products;
3. ``z = act(gate) * up``;
4. ``y = z V^T + s (drop(z) A'^T) B'^T``;
5. ``out = sum_k w_k y_k``.

The whole is one autograd node. Its backward is written out so that it keeps only the input, the
gate/up rows, the rank-sized products and ``y``; ``x`` and ``z`` are made again. Gram matrices of a
token's K activations and K outputs come out of the same node, so that losses on them cost two
small products and no copy of the vectors. Gathers have a backward without accumulating writes,
which makes a step repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.capture.grouped import (
    Groups,
    outer_sums,
    rows_times,
    rows_times_transposed,
    usable_on_device,
)

CACHED_BYTES = 2**20


@dataclass(frozen=True)
class LoraFactors:
    """Per-expert LoRA factors: the update of expert e is ``scaling * b[e] @ a[e]``.

    ``a_ErI`` (E, r, I) and ``b_EOr`` (E, O, r), both contiguous and in the compute dtype.
    """

    a_ErI: Tensor
    b_EOr: Tensor
    scaling: float
    dropout: float = 0.0


@dataclass
class ExpertsResult:
    """What the experts hand over. Everything but ``out_TH`` is None unless asked for.

    ``activations_*`` are z (after the gate, before the down projection), ``outputs_*`` are y
    (before the routing weight); Gram matrices are float32.
    """

    out_TH: Tensor
    activations_gram_TKK: Tensor | None = None
    outputs_gram_TKK: Tensor | None = None
    activations_TKD: Tensor | None = None
    outputs_TKH: Tensor | None = None


@dataclass(frozen=True)
class _Call:
    """The part of a call that carries no gradient."""

    index_TK: Tensor
    num_experts: int
    activation: Callable[[Tensor], Tensor]
    scaling_up: float
    scaling_down: float
    dropout_up: float
    dropout_down: float
    dropout_expert: float
    activations_gram: bool
    outputs_gram: bool
    activations: bool
    outputs: bool


def run_experts(
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    gate_up_E2DH: Tensor,
    down_EHD: Tensor,
    activation: Callable[[Tensor], Tensor],
    lora_up: LoraFactors | None = None,
    lora_down: LoraFactors | None = None,
    needs: frozenset[str] = frozenset(),
    expert_dropout: float = 0.0,
) -> ExpertsResult:
    """Run the experts on ``hidden_TH`` and return the combined output and what ``needs`` names.

    Args:
        hidden_TH: input, any float dtype; computed in the experts' dtype, returned in its own.
        index_TK: int64 experts of each token.
        weights_TK: routing weights.
        gate_up_E2DH: stacked gate and up projections, gate rows first.
        down_EHD: stacked down projections.
        activation: elementwise function of the gate (``model.act_fn``).
        lora_up: factors on ``gate_up_E2DH``; dropout draws one mask a token.
        lora_down: factors on ``down_EHD``; dropout draws one mask a row.
        needs: of "activations_gram", "outputs_gram", "activations", "outputs".
        expert_dropout: dropout on z before the down projection (ST-MoE); what is handed over as
            activations is z without it.
    """
    call = _Call(
        index_TK=index_TK,
        num_experts=gate_up_E2DH.shape[0],
        activation=activation,
        scaling_up=lora_up.scaling if lora_up else 0.0,
        scaling_down=lora_down.scaling if lora_down else 0.0,
        dropout_up=lora_up.dropout if lora_up else 0.0,
        dropout_down=lora_down.dropout if lora_down else 0.0,
        dropout_expert=expert_dropout,
        activations_gram="activations_gram" in needs,
        outputs_gram="outputs_gram" in needs,
        activations="activations" in needs,
        outputs="outputs" in needs,
    )
    compute = gate_up_E2DH.dtype
    out, z_gram, y_gram, z, y = _Experts.apply(
        call,
        hidden_TH.to(compute),
        weights_TK,
        gate_up_E2DH,
        down_EHD,
        lora_up.a_ErI if lora_up else None,
        lora_up.b_EOr if lora_up else None,
        lora_down.a_ErI if lora_down else None,
        lora_down.b_EOr if lora_down else None,
    )
    return ExpertsResult(out.to(hidden_TH.dtype), z_gram, y_gram, z, y)


class _Experts(torch.autograd.Function):
    """Steps 1-5 of the module docstring and their gradient."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden_TH, weights_TK, gate_up, down, a_up, b_up, a_down, b_down
    ):
        tokens, selected = call.index_TK.shape
        width = down.shape[2]
        with torch.autocast(hidden_TH.device.type, enabled=False):
            factors = [m for m in (a_up, b_up, a_down, b_down) if m is not None]
            groups = Groups.of(
                call.index_TK, call.num_experts, usable_on_device(gate_up, down, *factors)
            )
            x_SH = hidden_TH.index_select(0, groups.tokens_S)
            rows_S2D = rows_times_transposed(x_SH, gate_up, groups)
            mask_TH = p_up = None
            if a_up is not None:
                mask_TH = _keep_mask(hidden_TH, call.dropout_up)
                if mask_TH is not None:
                    dropped_TH = _dropped(hidden_TH, mask_TH, call.dropout_up)
                    x_SH = dropped_TH.index_select(0, groups.tokens_S)
                p_up = rows_times_transposed(x_SH, a_up, groups)
                rows_S2D.add_(rows_times_transposed(p_up, b_up, groups), alpha=call.scaling_up)
            del x_SH
            z_SD = _gated(rows_S2D, call.activation)
            z_TKD = None
            if call.activations or call.activations_gram:
                z_TKD = z_SD.index_select(0, groups.inverse_S).view(tokens, selected, width)
            expert_mask_SD = _keep_mask(z_SD, call.dropout_expert)
            z_SD = _dropped(z_SD, expert_mask_SD, call.dropout_expert)
            y_SH = rows_times_transposed(z_SD, down, groups)
            mask_SD = p_down = None
            if a_down is not None:
                mask_SD = _keep_mask(z_SD, call.dropout_down)
                z_SD = _dropped(z_SD, mask_SD, call.dropout_down)
                p_down = rows_times_transposed(z_SD, a_down, groups)
                y_SH.add_(rows_times_transposed(p_down, b_down, groups), alpha=call.scaling_down)
            del z_SD
            y_TKH, out_TH, y_gram = _by_token(y_SH, weights_TK, groups, call.outputs_gram)
            del y_SH
            z_gram = None if z_TKD is None or not call.activations_gram else _gram(z_TKD)
        ctx.call, ctx.groups = call, groups
        ctx.set_materialize_grads(False)
        keep_y = ctx.needs_input_grad[2] or call.outputs_gram
        ctx.save_for_backward(
            hidden_TH, weights_TK, gate_up, down, a_up, b_up, a_down, b_down,
            rows_S2D, p_up, p_down, y_TKH if keep_y else None, mask_TH, mask_SD,
            expert_mask_SD,
        )  # fmt: skip
        return (
            out_TH,
            z_gram,
            y_gram,
            z_TKD if call.activations else None,
            # A saved tensor may not be an output that somebody changes: hand out a view of it.
            y_TKH.view_as(y_TKH) if call.outputs else None,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out, grad_z_gram, grad_y_gram, grad_z, grad_y):
        (
            hidden_TH, weights_TK, gate_up, down, a_up, b_up, a_down, b_down,
            rows_S2D, p_up, p_down, y_TKH, mask_TH, mask_SD, expert_mask_SD,
        ) = ctx.saved_tensors  # fmt: skip
        call, groups = ctx.call, ctx.groups
        _, needs_h, needs_w, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        width = down.shape[2]
        with torch.autocast(hidden_TH.device.type, enabled=False):
            grad_weights = None
            if needs_w and grad_out is not None:
                grad_weights = torch.bmm(y_TKH, grad_out.to(y_TKH.dtype).unsqueeze(2)).squeeze(2)
                grad_weights = grad_weights.to(weights_TK.dtype)
            dy_SH = _output_gradient(
                grad_out, grad_y_gram, grad_y, weights_TK, y_TKH, hidden_TH, groups
            )
            z_SD = _gated(rows_S2D, call.activation)
            used_SD = _dropped(z_SD, expert_mask_SD, call.dropout_expert)
            grad_gate_up = grad_down = grad_a_up = grad_b_up = grad_a_down = grad_b_down = None

            # down projection
            dz_SD = rows_times(dy_SH, down, groups)
            if needs_down:
                grad_down = outer_sums(dy_SH, used_SD, groups)
            if a_down is not None:
                grad_b_down = outer_sums(dy_SH, p_down, groups).mul_(call.scaling_down)
                dp = rows_times(dy_SH, b_down, groups).mul_(call.scaling_down)
                dropped_SD = _dropped(used_SD, mask_SD, call.dropout_down)
                grad_a_down = outer_sums(dp, dropped_SD, groups)
                through_SD = rows_times(dp, a_down, groups)
                dz_SD.add_(_dropped(through_SD, mask_SD, call.dropout_down))
                del dropped_SD, through_SD
            dz_SD = _dropped(dz_SD, expert_mask_SD, call.dropout_expert)
            del dy_SH, used_SD

            # activation
            if grad_z_gram is not None or grad_z is not None:
                extra = _vectors_gradient(grad_z_gram, grad_z, z_SD, groups, call.index_TK, width)
                dz_SD.add_(extra)
            drows_S2D = _gated_backward(rows_S2D, dz_SD, call.activation)
            del dz_SD, z_SD

            # gate and up projections
            grad_hidden = None
            needs_x = needs_gate_up or a_up is not None
            x_SH: Any = hidden_TH.index_select(0, groups.tokens_S) if needs_x else None
            if needs_gate_up:
                grad_gate_up = outer_sums(drows_S2D, x_SH, groups)
            dx_dropped_SH = None
            if a_up is not None:
                if mask_TH is not None:
                    dropped_TH = _dropped(hidden_TH, mask_TH, call.dropout_up)
                    x_SH = dropped_TH.index_select(0, groups.tokens_S)
                grad_b_up = outer_sums(drows_S2D, p_up, groups).mul_(call.scaling_up)
                dp = rows_times(drows_S2D, b_up, groups).mul_(call.scaling_up)
                grad_a_up = outer_sums(dp, x_SH, groups)
                if needs_h:
                    dx_dropped_SH = rows_times(dp, a_up, groups)
            del x_SH
            if needs_h:
                dx_SH = rows_times(drows_S2D, gate_up, groups)
                if dx_dropped_SH is not None and mask_TH is None:
                    dx_SH.add_(dx_dropped_SH)
                grad_hidden = _sum_over_choices(dx_SH, groups, call.index_TK.shape)
                if dx_dropped_SH is not None and mask_TH is not None:
                    through = _sum_over_choices(dx_dropped_SH, groups, call.index_TK.shape)
                    grad_hidden.add_(_dropped(through, mask_TH, call.dropout_up))
        return (
            None, grad_hidden, grad_weights, grad_gate_up, grad_down,
            grad_a_up, grad_b_up, grad_a_down, grad_b_down,
        )  # fmt: skip


def _gated(rows_S2D: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = rows_S2D.chunk(2, dim=-1)
    return activation(gate).mul_(up) if activation_is_silu(activation) else activation(gate) * up


def activation_is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether the gate's function is SiLU, whose derivative is written out here."""
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _gated_backward(
    rows_S2D: Tensor, dz_SD: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    gate, up = rows_S2D.chunk(2, dim=-1)
    out_S2D = torch.empty_like(rows_S2D)
    dgate, dup = out_S2D.chunk(2, dim=-1)
    if activation_is_silu(activation):
        torch.mul(dz_SD, torch.nn.functional.silu(gate), out=dup)
        dgate.copy_(torch.ops.aten.silu_backward(dz_SD * up, gate))
        return out_S2D
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        value = activation(leaf)
    torch.mul(dz_SD, value.detach(), out=dup)
    dgate.copy_(torch.autograd.grad(value, leaf, dz_SD * up)[0])
    return out_S2D


def _keep_mask(like: Tensor, dropout: float) -> Tensor | None:
    if dropout == 0.0:
        return None
    return torch.empty_like(like, dtype=torch.bool).bernoulli_(1.0 - dropout)


def _dropped(values: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return values if mask is None else values * mask * (1.0 / (1.0 - dropout))


def _by_token(
    y_SH: Tensor, weights_TK: Tensor, groups: Groups, want_gram: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs in the tokens' order, their weighted sums and Gram matrices.

    A few tokens at a time on a CPU, so that what was just gathered is still in its cache.
    """
    (tokens, selected), hidden = weights_TK.shape, y_SH.shape[1]
    y_TKH = y_SH.new_empty(tokens, selected, hidden)
    out_TH = y_SH.new_empty(tokens, hidden)
    gram = y_SH.new_empty(tokens, selected, selected, dtype=_gram_dtype(y_SH))
    for span in _token_spans(y_SH, tokens, selected):
        rows = slice(span.start * selected, span.stop * selected)
        torch.index_select(y_SH, 0, groups.inverse_S[rows], out=y_TKH[span].view(-1, hidden))
        out_TH[span] = _combine(weights_TK[span], y_TKH[span])
        if want_gram:
            gram[span] = _gram(y_TKH[span])
    return y_TKH, out_TH, gram if want_gram else None


def _token_spans(like: Tensor, tokens: int, selected: int) -> list[slice]:
    """Tokens to take at a time: 1 MiB of vectors on a CPU, all on an accelerator."""
    step = tokens
    if like.device.type == "cpu":
        step = max(1, CACHED_BYTES // (selected * like.shape[1] * like.element_size()))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, max(step, 1))]


def _gram_dtype(vectors: Tensor) -> torch.dtype:
    return torch.promote_types(vectors.dtype, torch.float32)


def _combine(weights_TK: Tensor, y_TKH: Tensor) -> Tensor:
    if weights_TK.dtype == y_TKH.dtype == torch.float32:
        return torch.bmm(weights_TK.unsqueeze(1), y_TKH).squeeze(1)
    # Sum in float32 (float64 stays) without a float32 copy of all outputs.
    wide = torch.promote_types(torch.promote_types(weights_TK.dtype, y_TKH.dtype), torch.float32)
    out = torch.zeros(y_TKH.shape[0], y_TKH.shape[2], dtype=wide, device=y_TKH.device)
    for k in range(y_TKH.shape[1]):
        out.addcmul_(y_TKH[:, k], weights_TK[:, k, None])
    return out.to(y_TKH.dtype)


def _gram(vectors_TKX: Tensor) -> Tensor:
    """Inner products of a token's vectors, at least float32."""
    if vectors_TKX.dtype in (torch.float32, torch.float64):
        return torch.bmm(vectors_TKX, vectors_TKX.transpose(1, 2))
    if vectors_TKX.device.type == "cuda":
        return torch.bmm(vectors_TKX, vectors_TKX.transpose(1, 2), out_dtype=torch.float32)
    wide = vectors_TKX.float()
    return torch.bmm(wide, wide.transpose(1, 2))


def _gram_gradient(grad_TKK: Tensor, vectors_TKX: Tensor) -> Tensor:
    """Gradient of a Gram matrix with respect to its vectors: ``(G + G^T) V``."""
    return torch.bmm((grad_TKK + grad_TKK.transpose(1, 2)).to(vectors_TKX.dtype), vectors_TKX)


def _output_gradient(
    grad_out: Tensor | None,
    grad_gram: Tensor | None,
    grad_y: Tensor | None,
    weights_TK: Tensor,
    y_TKH: Tensor | None,
    like_TH: Tensor,
    groups: Groups,
) -> Tensor:
    """Gradient with respect to the sorted outputs ``y_SH``."""
    tokens, selected = weights_TK.shape
    if grad_gram is None and grad_y is None:
        if grad_out is None:
            return like_TH.new_zeros(groups.slots_S.numel(), like_TH.shape[1])
        weights_S = weights_TK.reshape(-1).index_select(0, groups.slots_S)
        rows_SH = grad_out.to(like_TH.dtype).index_select(0, groups.tokens_S)
        return rows_SH.mul_(weights_S.to(like_TH.dtype).unsqueeze(1))
    dy_SH = like_TH.new_empty(tokens * selected, like_TH.shape[1])
    for span in _token_spans(like_TH, tokens, selected):
        if grad_gram is not None:
            assert y_TKH is not None
            dy_TKH = _gram_gradient(grad_gram[span], y_TKH[span])
            if grad_y is not None:
                dy_TKH.add_(grad_y[span])
        else:
            assert grad_y is not None
            dy_TKH = grad_y[span].clone()
        if grad_out is not None:
            weights_TK1 = weights_TK[span].to(dy_TKH.dtype).unsqueeze(2)
            dy_TKH.addcmul_(weights_TK1, grad_out[span].to(dy_TKH.dtype).unsqueeze(1))
        rows = slice(span.start * selected, span.stop * selected)
        dy_SH.index_copy_(0, groups.inverse_S[rows], dy_TKH.flatten(0, 1))
    return dy_SH


def _vectors_gradient(
    grad_gram: Tensor | None,
    grad_vectors: Tensor | None,
    z_SD: Tensor,
    groups: Groups,
    index_TK: Tensor,
    width: int,
) -> Tensor:
    """Gradient that arrives at the activations by themselves, in sorted rows."""
    total: Tensor | None = None
    if grad_gram is not None:
        z_TKD = z_SD.index_select(0, groups.inverse_S).view(*index_TK.shape, width)
        total = _gram_gradient(grad_gram, z_TKD)
    if grad_vectors is not None:
        total = grad_vectors if total is None else total.add_(grad_vectors)
    assert total is not None
    return total.reshape(-1, width).index_select(0, groups.slots_S)


def _sum_over_choices(rows_SH: Tensor, groups: Groups, shape: torch.Size) -> Tensor:
    """Backward of the gather of tokens: a gather and a sum, so that it repeats exactly."""
    return rows_SH.index_select(0, groups.inverse_S).view(*shape, -1).sum(1)
