"""The gradient of the experts' forward, written out, stage by stage.

For S = T*K rows sorted by expert, with ``x`` the gathered input, ``g`` the rows of gate and up,
``z`` the activations and ``y`` the outputs of :mod:`moe_finetune.moe.experts.forward`:

1. ``dy = w dout`` for each choice, plus what the losses send into ``y`` or its Gram matrix;
2. through the down projection, ``dz = dy V + s (dy B') A'``, where ``dp = s dy B'`` (rank r) also
   gives ``dA' = dp^T z`` and ``dB' = s dy^T p'``, with ``p' = z A'^T`` from the forward;
3. ``dz`` gains what the losses send into ``z``, and the gate's derivative turns it into ``dg``;
4. through gate and up, ``dx = dg W + s (dg B) A``, with the same products for dA and dB;
5. ``dh`` of a token is the sum of its K choices' ``dx``.

Where all experts share A of gate and up, a token's K choices meet the same matrix: their ``dp`` are
summed first, and ``dA`` and LoRA's part of ``dh`` are one product each over the tokens.

Stages 1 to 4 run for some experts at a time, as in the forward; ``x`` and ``z`` are recomputed. If
LoRA's input had dropout, the gradient through A passes the same mask again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_finetune.moe.experts.gated import dropped, gated, gated_gradient
from moe_finetune.moe.experts.grouped_products import (
    Groups,
    OuterSums,
    Part,
    RowSums,
    add_rows_times,
    rows_times,
)
from moe_finetune.moe.experts.sums_by_token import (
    activations_gradient_,
    outputs_gradient,
    sum_over_choices,
)


@dataclass(frozen=True)
class Call:
    """Arguments of an experts call that are the same when a checkpointed layer runs again."""

    num_experts: int
    activation: Callable[[Tensor], Tensor]
    scaling_up: float
    scaling_down: float
    dropout_up: float
    dropout_down: float
    dropout_expert: float
    grouped: bool
    quantized: bool
    needs: frozenset[str]


class Saved(NamedTuple):
    """Tensors saved by the forward: its arguments in the order of their gradients, and results.

    ``p_up_Sr`` and ``p_down_Sr`` are products with LoRA's first factors; with one A of gate and up
    for all experts, ``a_up_ErH`` is (r, H) and ``p_up_Sr`` has a row a token; ``y_TKH`` is None if
    nothing reads it; masks show what dropout kept; the last three are :meth:`Groups.saved`.
    """

    hidden_TH: Tensor
    weights_TK: Tensor
    gate_up_E2DH: Tensor
    down_EHD: Tensor
    a_up_ErH: Tensor | None
    b_up_E2Dr: Tensor | None
    a_down_ErD: Tensor | None
    b_down_EHr: Tensor | None
    bias_up_E2D: Tensor | None
    bias_down_EH: Tensor | None
    rows_S2D: Tensor
    p_up_Sr: Tensor | None
    p_down_Sr: Tensor | None
    y_TKH: Tensor | None
    mask_TH: Tensor | None
    mask_SD: Tensor | None
    expert_mask_SD: Tensor | None
    slots_S: Tensor
    offsets_E: Tensor
    bounds: Tensor | None


class Incoming(NamedTuple):
    """Gradients of the forward's results; None for unused ones."""

    out_TH: Tensor | None
    z_gram_TKK: Tensor | None
    y_gram_TKK: Tensor | None
    z_TKD: Tensor | None
    y_TKH: Tensor | None


class ExpertsGradient:
    """One backward pass: stages 1 to 5 of the module docstring.

    ``needs_grad``: whether each argument of the forward needs one, in the order of :class:`Saved`.
    """

    def __init__(
        self,
        saved: Saved,
        call: Call,
        incoming: Incoming,
        needs_grad: tuple[bool, ...],
    ):
        self.saved, self.call = saved, call
        self.groups = groups = Groups.restored(
            saved.slots_S, saved.offsets_E, saved.bounds, saved.weights_TK.shape[1], call.grouped
        )
        self.needs_h, self.needs_weights, needs_gate_up, needs_down, *_ = needs_grad
        needs_bias_up, needs_bias_down = needs_grad[8:10]  # after the four LoRA factors
        like, out_TH = saved.hidden_TH, incoming.out_TH
        self.out_TH = None if out_TH is None else out_TH.to(like.dtype)
        self.rows_S = groups.inverse()  # flat pair -> sorted row
        self.incoming = incoming._replace(out_TH=self.out_TH)

        def outer(weight: Tensor | None, scale: float = 1.0) -> OuterSums:
            return OuterSums(weight, groups, scale)

        self.d_gate_up = outer(saved.gate_up_E2DH if needs_gate_up else None)
        self.d_down = outer(saved.down_EHD if needs_down else None)
        self.shares_a = saved.a_up_ErH is not None and saved.a_up_ErH.ndim == 2
        self.d_a_up = outer(None if self.shares_a else saved.a_up_ErH)
        self.d_b_up = outer(saved.b_up_E2Dr, call.scaling_up)
        self.d_a_down = outer(saved.a_down_ErD)
        self.d_b_down = outer(saved.b_down_EHr, call.scaling_down)
        self.d_bias_up = RowSums(saved.bias_up_E2D if needs_bias_up else None, groups)
        self.d_bias_down = RowSums(saved.bias_down_EH if needs_bias_down else None, groups)
        self.needs_bias_up, self.needs_bias_down = needs_bias_up, needs_bias_down
        self.needs_gate_up, self.needs_down = needs_gate_up, needs_down
        self._begin_outputs()
        self._begin_activations()
        self._begin_input()

    def run(self, parts: list[Part]) -> tuple[Tensor | None, ...]:
        """The gradients of the forward's arguments, in the order of :class:`Saved`."""
        for part in parts:
            rows_P2D = self.saved.rows_S2D[part.rows]
            dz_PD = self._through_down(part, self._of_outputs(part), rows_P2D)
            if self.dz_losses_SD is not None:
                # Losses read z before the experts' dropout, so their gradient passes no mask.
                dz_PD.add_(self.dz_losses_SD[part.rows])
            drows_P2D = gated_gradient(rows_P2D, dz_PD, self.call.activation)
            del dz_PD
            self._through_up(part, drows_P2D)
        dh_TH, d_a_up = self._of_input(), self.d_a_up.result()
        if self.shares_a:
            d_a_up = self._through_shared_a(dh_TH)
        after_a = self.d_b_up, self.d_a_down, self.d_b_down, self.d_bias_up, self.d_bias_down
        return (
            *(dh_TH, self._of_weights(), self.d_gate_up.result(), self.d_down.result(), d_a_up),
            *(total.result() for total in after_a),
        )

    # -- 1: the outputs ------------------------------------------------------------------------

    def _begin_outputs(self) -> None:
        """Compute ``dy_SH`` if losses read the outputs, else sort the routing weights by row."""
        saved, incoming = self.saved, self.incoming
        self.dy_SH = self.weights_S = None
        if incoming.y_gram_TKK is not None or incoming.y_TKH is not None:
            assert saved.y_TKH is not None
            self.dy_SH = outputs_gradient(
                self.out_TH,
                incoming.y_gram_TKK,
                incoming.y_TKH,
                saved.weights_TK,
                saved.y_TKH,
                self.rows_S,
            )
        elif self.out_TH is not None:
            weights_S = saved.weights_TK.reshape(-1).index_select(0, self.groups.slots_S)
            self.weights_S = weights_S.to(saved.hidden_TH.dtype)

    def _of_outputs(self, part: Part) -> Tensor:
        """``dy`` (P, H) for a part's rows."""
        if self.dy_SH is not None:
            return self.dy_SH[part.rows]
        if self.weights_S is None:  # only losses on the activations are differentiated
            like = self.saved.hidden_TH
            return like.new_zeros(part.tokens_P.numel(), like.shape[1])
        assert self.out_TH is not None
        dy_PH = self.out_TH.index_select(0, part.tokens_P)
        return dy_PH.mul_(self.weights_S[part.rows].unsqueeze(1))

    def _of_weights(self) -> Tensor | None:
        """``dw_tk = y_tk . dout_t``; y is kept before its weight, which may be 0."""
        if not self.needs_weights or self.out_TH is None:
            return None
        y_TKH, weights_TK = self.saved.y_TKH, self.saved.weights_TK
        assert y_TKH is not None
        dw_TK = torch.bmm(y_TKH, self.out_TH.to(y_TKH.dtype).unsqueeze(2)).squeeze(2)
        return dw_TK.to(weights_TK.dtype)

    # -- 2: the down projection ------------------------------------------------------------------

    def _through_down(self, part: Part, dy_PH: Tensor, rows_P2D: Tensor) -> Tensor:
        """``dz`` (P, D), and the gradients of the down projection and its factors."""
        saved, call = self.saved, self.call
        expert_mask = _rows(saved.expert_mask_SD, part)
        # z again from the kept rows of gate and up: it is elementwise, and takes half their memory.
        z_PD = dropped(gated(rows_P2D, call.activation), expert_mask, call.dropout_expert)
        dz_PD = rows_times(dy_PH, saved.down_EHD, part)
        if self.needs_bias_down:
            self.d_bias_down.add(dy_PH, part)
        if self.needs_down:
            self.d_down.add(dy_PH, z_PD, part)
        if saved.a_down_ErD is not None and saved.b_down_EHr is not None:
            assert saved.p_down_Sr is not None
            mask = _rows(saved.mask_SD, part)
            dp_Pr = rows_times(dy_PH, saved.b_down_EHr, part, call.scaling_down)
            self.d_b_down.add(dy_PH, saved.p_down_Sr[part.rows], part)
            self.d_a_down.add(dp_Pr, dropped(z_PD, mask, call.dropout_down), part)
            if mask is None:
                add_rows_times(dz_PD, dp_Pr, saved.a_down_ErD, part)
            else:
                through_PD = rows_times(dp_Pr, saved.a_down_ErD, part)
                dz_PD.add_(dropped(through_PD, mask, call.dropout_down))
        return dropped(dz_PD, expert_mask, call.dropout_expert)

    # -- 3: the activations ----------------------------------------------------------------------

    def _begin_activations(self) -> None:
        """Gradient (S, D) from losses on the activations, which are before the experts' dropout."""
        incoming = self.incoming
        self.dz_losses_SD = None
        if incoming.z_gram_TKK is not None or incoming.z_TKD is not None:
            z_SD = gated(self.saved.rows_S2D, self.call.activation)
            self.dz_losses_SD = activations_gradient_(
                incoming.z_gram_TKK, incoming.z_TKD, z_SD, self.rows_S
            )

    # -- 4: gate and up --------------------------------------------------------------------------

    def _begin_input(self) -> None:
        """Allocate ``dx`` (S, H), and LoRA's part of it separately if it passes a mask."""
        saved, groups = self.saved, self.groups
        like, hidden = saved.hidden_TH, saved.hidden_TH.shape[1]
        self.separate = saved.mask_TH is not None and not self.shares_a
        self.lora_input_TH = dropped(like, saved.mask_TH, self.call.dropout_up)
        self.dx_SH: Tensor | None = None
        self.dx_lora_SH: Tensor | None = None
        self.dp_up_Sr: Tensor | None = None
        if self.shares_a and saved.a_up_ErH is not None:
            self.dp_up_Sr = groups.buffer(saved.a_up_ErH.shape[0], like)
        if self.needs_h:
            # A part's dy has been used up when its dx is written; one product needs no buffer.
            in_parts = groups.bounds is not None
            self.dx_SH = self.dy_SH if in_parts else None
            if self.dx_SH is None:
                self.dx_SH = groups.buffer(hidden, like)
            self.dx_lora_SH = groups.buffer(hidden, like) if self.separate else None

    def _through_up(self, part: Part, drows_P2D: Tensor) -> None:
        """``dx`` of a part, and the gradients of gate and up projections and their factors."""
        saved, call = self.saved, self.call
        if self.needs_bias_up:
            self.d_bias_up.add(drows_P2D, part)
        if self.needs_gate_up:
            x_PH = saved.hidden_TH.index_select(0, part.tokens_P)
            self.d_gate_up.add(drows_P2D, x_PH, part)
        dx = dx_lora = dp_Pr = None
        if self.needs_h:
            dx = rows_times(drows_P2D, saved.gate_up_E2DH, part, out=self.dx_SH)
        if saved.a_up_ErH is not None and saved.b_up_E2Dr is not None:
            assert saved.p_up_Sr is not None
            dp_Pr = rows_times(drows_P2D, saved.b_up_E2Dr, part, call.scaling_up, out=self.dp_up_Sr)
            if self.shares_a:
                p_Pr = saved.p_up_Sr.index_select(0, part.tokens_P)
            else:
                p_Pr = saved.p_up_Sr[part.rows]
                x_PH = self.lora_input_TH.index_select(0, part.tokens_P)
                self.d_a_up.add(dp_Pr, x_PH, part)
            self.d_b_up.add(drows_P2D, p_Pr, part)
            if self.needs_h and self.separate:
                dx_lora = rows_times(dp_Pr, saved.a_up_ErH, part, out=self.dx_lora_SH)
            elif dx is not None and not self.shares_a:
                add_rows_times(dx, dp_Pr, saved.a_up_ErH, part)
        if self.groups.bounds is None:  # the one part is the whole
            self.dx_SH, self.dx_lora_SH, self.dp_up_Sr = dx, dx_lora, dp_Pr

    def _through_shared_a(self, dh_TH: Tensor | None) -> Tensor:
        """The gradient (r, H) of one A for all experts; adds LoRA's part to ``dh``, in place.

        A token's K rows meet the same A, so their ``dp`` are summed first.
        """
        saved, dropout = self.saved, self.call.dropout_up
        assert self.dp_up_Sr is not None and saved.a_up_ErH is not None
        dp_Tr = sum_over_choices(self.dp_up_Sr, self.rows_S, saved.weights_TK.shape)
        if dh_TH is not None:
            dh_TH.add_(dropped(dp_Tr @ saved.a_up_ErH, saved.mask_TH, dropout))
        return dp_Tr.t() @ self.lora_input_TH

    # -- 5: the input ----------------------------------------------------------------------------

    def _of_input(self) -> Tensor | None:
        """``dh`` (T, H)."""
        if not self.needs_h:
            return None
        shape = self.saved.weights_TK.shape
        assert self.dx_SH is not None
        dh_TH = sum_over_choices(self.dx_SH, self.rows_S, shape)
        if self.separate:
            assert self.dx_lora_SH is not None
            through_TH = sum_over_choices(self.dx_lora_SH, self.rows_S, shape)
            dh_TH.add_(dropped(through_TH, self.saved.mask_TH, self.call.dropout_up))
        return dh_TH


def _rows(mask_SD: Tensor | None, part: Part) -> Tensor | None:
    return None if mask_SD is None else mask_SD[part.rows]
