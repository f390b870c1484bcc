"""Keep the experts that another forward selected for the same tokens: router replay.

In reinforcement learning the engine that samples a completion, the old policy's forward and the
training forwards compute the same tokens with small differences (dtypes, kernels, weights updated
in between). Where these select other experts, a token's probability changes, and its ratio with it.
Router replay trains each token with the experts of one of those forwards (Ma et al. 2025,
"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"). The weights
are the current router's for these experts, so the router still learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError
from moe_finetune.losses.tensors import packed_index
from moe_finetune.moe.choice.select_again import Weighting, same_experts, select_again
from moe_finetune.moe.context import ForwardOverrides

ON_DEVICE = 256 * 2**20
"""Bytes of a choice from which on it is kept in host memory."""


@dataclass(frozen=True)
class PinnedChoice:
    """The experts of whole rows.

    Attributes:
        index_BSLK: uint8 up to 256 experts, int16 above; on the host from :data:`ON_DEVICE` on.
        missing_BS: bool, True for tokens that the other forward did not run.
    """

    index_BSLK: Tensor
    missing_BS: Tensor


def empty_choice(
    mask_BS: Tensor, layers: int, top_k: int, num_experts: int, device: torch.device
) -> PinnedChoice:
    """A choice to be filled, for rows whose attention mask is ``mask_BS``."""
    like = packed_index(torch.empty((), dtype=torch.int64), num_experts)
    shape = (*mask_BS.shape, layers, top_k)
    if torch.Size(shape).numel() * like.element_size() > ON_DEVICE:
        device = torch.device("cpu")
    index_BSLK = torch.zeros(shape, dtype=like.dtype, device=device)
    return PinnedChoice(index_BSLK, mask_BS == 0)


class RecordsChoice:
    """Records which experts forwards of some rows each select, in the order of the rows.

    Use ``recorder.using(overrides=records.begin)`` around them. Tokens that the attention mask
    ``mask_BS`` of all rows excludes are ``missing_BS`` of ``choice``, the result.
    """

    def __init__(self, mask_BS: Tensor, layers: Sequence[int]):
        self.mask_BS = mask_BS
        self.places = {layer: place for place, layer in enumerate(layers)}
        self.choice: PinnedChoice | None = None
        self._next = 0

    def begin(self, rows: int) -> ForwardOverrides:
        part = slice(self._next, self._next + rows)
        self._next += rows
        return ForwardOverrides(route=partial(self._note, part))

    def _note(
        self, part: slice, layer: Any, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.choice is None:
            sizes = len(self.places), index_TK.shape[1], logits_TE.shape[1]
            self.choice = empty_choice(self.mask_BS, *sizes, index_TK.device)
        index_BSK = self.choice.index_BSLK[part, :, self.places[layer.index]]
        index_BSK.copy_(packed_index(index_TK, logits_TE.shape[1]).view(index_BSK.shape))
        return weights_TK, index_TK


class PinsChoice:
    """Replaces the routers' selection by a recorded one, and counts where they differ.

    Use ``recorder.using(overrides=pins.begin)`` while the model runs the rows in order.

    Args:
        choice: the experts that rows get; tokens that are missing there keep their own.
        counted_BS: bool, True for tokens to compare.
        layers: decoder indices of the MoE layers, in the order of L.

    Attributes:
        changed, compared: float64 counts of (token, layer) pairs: whose router would select other
            experts, and all. A layer's router reads what the pinned experts below it returned.
    """

    def __init__(self, choice: PinnedChoice, counted_BS: Tensor, layers: Sequence[int]):
        self.choice, self.counted_BS = choice, counted_BS & ~choice.missing_BS
        self.places = {layer: place for place, layer in enumerate(layers)}
        self.changed = self.compared = torch.zeros(
            (), dtype=torch.float64, device=counted_BS.device
        )
        self._next = 0

    def begin(self, rows: int) -> ForwardOverrides:
        part = slice(self._next, self._next + rows)
        self._next += rows
        device = self.counted_BS.device
        index_BSLK = self.choice.index_BSLK[part].to(device, non_blocking=True)
        ran_T1 = ~self.choice.missing_BS[part].reshape(-1, 1)
        counted_T = self.counted_BS[part].reshape(-1)
        return ForwardOverrides(route=partial(self._route, index_BSLK, ran_T1, counted_T))

    def _route(
        self,
        index_BSLK: Tensor,
        ran_T1: Tensor,
        counted_T: Tensor,
        layer: Any,
        logits_TE: Tensor,
        weights_TK: Tensor,
        index_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        pinned_TK = index_BSLK[:, :, self.places[layer.index]].flatten(0, 1).long()
        if pinned_TK.shape != index_TK.shape:
            raise CaptureError(
                f"layer {layer.index} selects experts of shape {tuple(index_TK.shape)}, but those "
                f"to replay are {tuple(pinned_TK.shape)}; they belong to other rows"
            )
        pinned_TK = torch.where(ran_T1, pinned_TK, index_TK)
        if layer.index not in layer.context.choices:  # not when a checkpointed layer runs again
            self.compared = self.compared + counted_T.sum()
            self.changed = self.changed + (counted_T & ~same_experts(pinned_TK, index_TK)).sum()
        weighting = Weighting(layer)
        scores_TE = weighting.scores(logits_TE)
        return select_again(scores_TE, pinned_TK, index_TK, weights_TK, weighting)
