"""The routed experts' forward, with LoRA computed separately from the frozen stack.

Steps, for T tokens that each select K of E experts (S = T*K rows sorted by expert):

1. gather each expert's rows ``x_SH`` from the input;
2. ``gate_up = x W^T + b + s (drop(x) A^T) B^T`` with grouped products;
3. ``z = act(gate) * up``, or the class's own function of ``gate_up``;
4. ``y = z V^T + c + s (drop(z) A'^T) B'^T``;
5. ``out = sum_k w_k y_k``.

All steps are one autograd node. Its backward is written out (:mod:`.experts_backward`) and needs
only the input, the gate/up rows, the rank-sized products and ``y``. The node also returns Gram
matrices of a token's K activations and K outputs, so losses on them cost two small products and no
copy of the vectors. On a CPU steps 1-4 run a few experts at a time, so rows stay in its cache.
Nothing is accumulated by concurrent writes, so a step is deterministic bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_finetune.losses.tensors import without_autocast
from moe_finetune.moe.experts.backward import Call, ExpertsGradient, Incoming, Saved
from moe_finetune.moe.experts.dense_router import DenseScores, unselected_gradient
from moe_finetune.moe.experts.gated import dropped, gated, keep_mask
from moe_finetune.moe.experts.grouped_products import Groups, Part, add_rows_times, rows_times
from moe_finetune.moe.experts.offloaded_stack import dequantized_when_read
from moe_finetune.moe.experts.sums_by_token import combine, gram


@dataclass(frozen=True)
class LoraFactors:
    """Per-expert LoRA factors: the update of expert e is ``scaling * b[e] @ a[e]``.

    ``a_ErI`` (E, r, I) and ``b_EOr`` (E, O, r), both contiguous and in the compute dtype. A of gate
    and up may be one (r, I) for all experts, and B of the down projection one (O, r).
    """

    a_ErI: Tensor
    b_EOr: Tensor
    scaling: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Experts:
    """The experts of one layer and how to run them.

    Attributes:
        gate_up_E2DH: stacked gate and up projections, gate rows first, or in the order that an
            :class:`OwnGate` expects. Any strides.
        down_EHD: stacked down projections. Any strides.
        activation: elementwise function of the gate (``model.act_fn``), or an ``OwnGate``.
        lora_up: factors on ``gate_up_E2DH``; dropout draws one mask per token.
        lora_down: factors on ``down_EHD``; dropout draws one mask per row.
        bias_up_E2D, bias_down_EH: biases of the projections, or None.
        dropout: on z before the down projection (ST-MoE); returned activations are without it.
        grouped: one product for all experts instead of one each, see ``grouped_products``; the
            factors' rank must be aligned too.
    """

    gate_up_E2DH: Tensor
    down_EHD: Tensor
    activation: Callable[[Tensor], Tensor]
    lora_up: LoraFactors | None = None
    lora_down: LoraFactors | None = None
    bias_up_E2D: Tensor | None = None
    bias_down_EH: Tensor | None = None
    dropout: float = 0.0
    grouped: bool = False


@dataclass
class ExpertsResult:
    """The experts' results. Everything except ``out_TH`` is None unless requested.

    ``activations_*`` are z (after the gate, before the down projection), ``outputs_*`` are y
    (before the routing weight); Gram matrices are float32.
    """

    out_TH: Tensor
    activations_gram_TKK: Tensor | None = None
    outputs_gram_TKK: Tensor | None = None
    activations_TKD: Tensor | None = None
    outputs_TKH: Tensor | None = None


# If traced, its loop over the experts would be unrolled for every new set of group sizes.
@torch.compiler.disable
def run_experts(
    hidden_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    experts: Experts,
    needs: frozenset[str] = frozenset(),
    dense: DenseScores | None = None,
) -> ExpertsResult:
    """Run the experts on ``hidden_TH``; return the combined output and the results in ``needs``
    ("activations_gram", "outputs_gram", "activations", "outputs").

    The input's float dtype is converted to the experts' and back. With ``dense`` the backward also
    gives the weights of unselected experts their gradient.
    """
    gate_up = experts.gate_up_E2DH
    lora_up = experts.lora_up
    lora_down = experts.lora_down
    call = Call(
        num_experts=gate_up.shape[0],
        activation=experts.activation,
        scaling_up=lora_up.scaling if lora_up else 0.0,
        scaling_down=lora_down.scaling if lora_down else 0.0,
        dropout_up=lora_up.dropout if lora_up else 0.0,
        dropout_down=lora_down.dropout if lora_down else 0.0,
        dropout_expert=experts.dropout,
        grouped=experts.grouped,
        quantized=any(map(dequantized_when_read, (gate_up, experts.down_EHD))),
        needs=needs,
    )
    out, z_gram, y_gram, z, y = _Experts.apply(
        call,
        index_TK,
        hidden_TH.to(gate_up.dtype),
        weights_TK,
        gate_up,
        experts.down_EHD,
        lora_up.a_ErI if lora_up else None,
        lora_up.b_EOr if lora_up else None,
        lora_down.a_ErI if lora_down else None,
        lora_down.b_EOr if lora_down else None,
        experts.bias_up_E2D,
        experts.bias_down_EH,
        None if dense is None else dense.draws,
        None if dense is None else dense.weights_TE,
    )
    return ExpertsResult(out.to(hidden_TH.dtype), z_gram, y_gram, z, y)


class _Experts(torch.autograd.Function):
    """Autograd function of steps 1-5 in the module docstring."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, index_TK, hidden_TH, weights_TK, gate_up, down, a_up, b_up, a_down,
        b_down, bias_up, bias_down, draws=None, dense_weights_TE=None,
    ):  # fmt: skip
        tokens, selected = index_TK.shape
        (_, hidden, width), pairs = down.shape, index_TK.numel()
        flat_S = index_TK.reshape(-1)
        with without_autocast(hidden_TH.device):
            groups = Groups.of(index_TK, call.num_experts, call.grouped, in_chunks=call.quantized)
            mask_TH = keep_mask(hidden_TH.shape, call.dropout_up, hidden_TH)
            expert_mask_SD = keep_mask((pairs, width), call.dropout_expert, hidden_TH)
            mask_SD = keep_mask((pairs, width), call.dropout_down, hidden_TH)
            lora_input_TH = dropped(hidden_TH, mask_TH, call.dropout_up)
            # With one A for all experts, each token meets it once and not K times.
            p_up_Tr = lora_input_TH @ a_up.mT if a_up is not None and a_up.ndim == 2 else None

            rows_S2D = groups.buffer(gate_up.shape[1], hidden_TH)
            p_up_Sr = p_down_Sr = None
            if a_up is not None and p_up_Tr is None:
                p_up_Sr = groups.buffer(a_up.shape[1], hidden_TH)
            if a_down is not None:
                p_down_Sr = groups.buffer(a_down.shape[1], hidden_TH)
            y_TKH = hidden_TH.new_empty(tokens, selected, hidden)
            z_TKD = None
            if call.needs & {"activations", "activations_gram"}:
                z_TKD = hidden_TH.new_empty(tokens, selected, width)

            for part in _parts(groups, gate_up):
                x = hidden_TH.index_select(0, part.tokens_P)
                rows = rows_times(x, gate_up.transpose(1, 2), part, out=rows_S2D)
                if bias_up is not None:
                    rows.add_(bias_up[flat_S[part.slots_P]])
                p_up = p_down = None
                if a_up is not None:
                    if p_up_Tr is not None:
                        p_up = p_up_Tr.index_select(0, part.tokens_P)
                    else:
                        if mask_TH is not None:
                            x = lora_input_TH.index_select(0, part.tokens_P)
                        p_up = rows_times(x, a_up.mT, part, out=p_up_Sr)
                    add_rows_times(rows, p_up, b_up.mT, part, call.scaling_up)
                z = gated(rows, call.activation)
                if z_TKD is not None:
                    z_TKD.view(-1, width).index_copy_(0, part.slots_P, z)
                z = dropped(z, _rows(expert_mask_SD, part), call.dropout_expert)
                y = rows_times(z, down.transpose(1, 2), part)
                if bias_down is not None:
                    y.add_(bias_down[flat_S[part.slots_P]])
                if a_down is not None:
                    z = dropped(z, _rows(mask_SD, part), call.dropout_down)
                    p_down = rows_times(z, a_down.mT, part, out=p_down_Sr)
                    add_rows_times(y, p_down, b_down.mT, part, call.scaling_down)
                y_TKH.view(-1, hidden).index_copy_(0, part.slots_P, y)
                if groups.bounds is None:
                    # The one part is the whole.
                    rows_S2D = rows
                    p_up_Sr = p_up
                    p_down_Sr = p_down
                del x, rows, z, y

            out_TH, y_gram = combine(weights_TK, y_TKH, "outputs_gram" in call.needs)
            z_gram = None
            if z_TKD is not None and "activations_gram" in call.needs:
                z_gram = gram(z_TKD)
        ctx.call, ctx.draws = call, draws
        ctx.set_materialize_grads(False)
        keep_y = ctx.needs_input_grad[3] or call.needs & {"outputs", "outputs_gram"}
        assert rows_S2D is not None  # a part's, or the buffer of all
        saved = Saved(
            hidden_TH, weights_TK, gate_up, down, a_up, b_up, a_down, b_down, bias_up, bias_down,
            rows_S2D, p_up_Sr if p_up_Tr is None else p_up_Tr, p_down_Sr, y_TKH if keep_y else None,
            mask_TH, mask_SD, expert_mask_SD, *groups.saved(),
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        return (
            out_TH,
            z_gram,
            y_gram,
            z_TKD if "activations" in call.needs else None,
            # A saved tensor must not be an output that the caller may modify: return a view of it.
            y_TKH.view_as(y_TKH) if "outputs" in call.needs else None,
        )

    # A second derivative would be of the written-out backward, which has no graph: torch raises.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None):
        saved, needs_grad = Saved(*ctx.saved_tensors), ctx.needs_input_grad[2:]
        with without_autocast(saved.hidden_TH.device):
            gradient = ExpertsGradient(saved, ctx.call, Incoming(*incoming), needs_grad)
            gradients = gradient.run(_parts(gradient.groups, saved.gate_up_E2DH))
            dense_TE = None
            if ctx.needs_input_grad[-1] and gradient.out_TH is not None:
                run = partial(_outputs, saved, ctx.call)
                dense_TE = unselected_gradient(saved, ctx.call, gradient.out_TH, ctx.draws, run)
            return (None, None, *gradients, None, dense_TE)


def _outputs(saved: Saved, call: Call, rows_T: Tensor, index_Tm: Tensor) -> Tensor:
    """Outputs (T, m, H) of the experts ``index_Tm`` on the tokens ``rows_T``, without dropout."""
    plain = replace(
        call, needs=frozenset({"outputs"}), dropout_up=0.0, dropout_down=0.0, dropout_expert=0.0
    )
    hidden_TH = saved.hidden_TH[rows_T]
    unused_Tm = torch.zeros_like(index_Tm, dtype=hidden_TH.dtype)
    *_, y_TmH = _Experts.apply(
        plain, index_Tm, hidden_TH, unused_Tm, saved.gate_up_E2DH, saved.down_EHD, saved.a_up_ErH,
        saved.b_up_E2Dr, saved.a_down_ErD, saved.b_down_EHr, saved.bias_up_E2D, saved.bias_down_EH,
        None, None,
    )  # fmt: skip
    return y_TmH


def _parts(groups: Groups, gate_up: Tensor) -> list[Part]:
    _, rows, hidden = gate_up.shape
    item = gate_up.element_size()
    return groups.parts(row_bytes=hidden * item, matrix_bytes=rows * hidden * item)


def _rows(mask_SD: Tensor | None, part: Part) -> Tensor | None:
    return None if mask_SD is None else mask_SD[part.rows]
