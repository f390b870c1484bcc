"""Record which experts a rollout selects, and compare or replay them in training.

A rollout runs the prompt at once and then one token at a time, with a cache; training runs whole
rows. Small differences (dtypes, kernels, weights updated in between) change the selected experts,
and with them a token's probability. Router replay keeps the rollout's selection (Ma et al. 2025,
"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"). The weights
are the current router's for those experts, so the router still learns.

Shape legend: B rows, S positions per row, T = B x S tokens, L MoE layers, E experts, K selected.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError
from moe_finetune.moe.biased_choice import Weighting, same_experts, select_again
from moe_finetune.moe.context import ForwardOverrides

NOT_RUN = -1
"""Placeholder for an expert: the rollout did not run this token."""


class RolloutChoice:
    """Records which experts a rollout's forwards select.

    Use ``recorder.using(overrides=choice.begin)`` while the model generates.

    Args:
        layers: decoder indices of the MoE layers.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._forwards: list[dict[int, Tensor]] = []
        self._places: int | None = None

    def begin(self, rows: int) -> ForwardOverrides:
        noted: dict[int, Tensor] = {}
        self._forwards.append(noted)

        def note(
            layer: Any, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
        ) -> tuple[Tensor, Tensor]:
            noted[layer.index] = index_TK.view(rows, -1, index_TK.shape[-1]).to(torch.int16)
            return weights_TK, index_TK

        return ForwardOverrides(route=note)

    def end(self, places: int) -> None:
        """Discard positions after the first ``places`` of the rows."""
        self._places = places

    def experts(self, attention_mask_BS: Tensor) -> Tensor:
        """Experts ``(B, S, L, K)``, int16, of rows that start like the rollout's.

        ``NOT_RUN`` where the mask is 0 and after the last position that ran; the last sampled token
        never ran.

        Raises:
            CaptureError: the rollout did not run these rows in this order.
        """
        rows, places = attention_mask_BS.shape
        by_layer = [
            torch.cat([noted[layer] for noted in self._forwards], dim=1) for layer in self.layers
        ]
        ran_BSLK = torch.stack(by_layer, dim=2)[:, : self._places]
        if len(ran_BSLK) != rows or ran_BSLK.shape[1] > places:
            raise CaptureError(
                f"the rollout ran {ran_BSLK.shape[1]} places of {len(ran_BSLK)} rows, but "
                f"training has {places} of {rows}; the rollout did not sample them one by one"
            )
        missing = places - ran_BSLK.shape[1]
        padded_BSLK = torch.nn.functional.pad(ran_BSLK, (0, 0, 0, 0, 0, missing), value=NOT_RUN)
        return padded_BSLK.masked_fill(attention_mask_BS[:, :, None, None] == 0, NOT_RUN)


class AgainstRollout:
    """Compares the routers' selection with a rollout's, and replaces it if requested.

    Use ``recorder.using(overrides=against.begin)`` while training runs the rows in order.

    Args:
        experts_BSLK: result of :meth:`RolloutChoice.experts`.
        counted_BS: bool, True for tokens to compare.
        layers: decoder indices of the MoE layers, in the order of L.
        replay: whether tokens get the rollout's experts.

    Attributes:
        changed, compared: float64 counts of (token, layer) pairs: with other experts, and all. A
            recomputed layer is counted once.
    """

    def __init__(
        self, experts_BSLK: Tensor, counted_BS: Tensor, layers: Sequence[int], replay: bool
    ):
        self.experts_BSLK, self.counted_BS = experts_BSLK, counted_BS
        self.places = {layer: place for place, layer in enumerate(layers)}
        self.replay = replay
        self.changed = self.compared = torch.zeros(
            (), dtype=torch.float64, device=experts_BSLK.device
        )
        self._next = 0

    def begin(self, rows: int) -> ForwardOverrides:
        part = slice(self._next, self._next + rows)
        self._next += rows
        experts_BSLK, counted_T = self.experts_BSLK[part], self.counted_BS[part].reshape(-1)
        return ForwardOverrides(route=partial(self._route, experts_BSLK, counted_T, set()))

    def _route(
        self,
        experts_BSLK: Tensor,
        counted_T: Tensor,
        seen: set[int],
        layer: Any,
        logits_TE: Tensor,
        weights_TK: Tensor,
        index_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return weights and index; ``seen``: layers already visited in this forward."""
        theirs_TK = experts_BSLK[:, :, self.places[layer.index]].flatten(0, 1).long()
        if theirs_TK.shape != index_TK.shape:
            raise CaptureError(
                f"layer {layer.index} selects experts of shape {tuple(index_TK.shape)}, but the "
                f"rollout's are {tuple(theirs_TK.shape)}; the rollout did not run these rows"
            )
        ran_T1 = (theirs_TK != NOT_RUN).all(-1, keepdim=True)
        theirs_TK = torch.where(ran_T1, theirs_TK, index_TK)
        if layer.index not in seen:
            seen.add(layer.index)
            counts_T = counted_T & ran_T1.squeeze(-1)
            self.compared = self.compared + counts_T.sum()
            self.changed = self.changed + (counts_T & ~same_experts(theirs_TK, index_TK)).sum()
        if not self.replay:
            return weights_TK, index_TK
        weighting = Weighting(layer)
        scores_TE = weighting.scores(logits_TE)
        return select_again(scores_TE, theirs_TK, index_TK, weights_TK, weighting)
