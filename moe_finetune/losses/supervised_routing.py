"""Supervised routing: the router learns where each token should go (P3 §3.2)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator
from torch import Tensor

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LayerContext, ModelFacts, Term, TermOptions
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import (
    blank,
    check_shapes,
    counted,
    full_precision,
    mean_over_tokens,
)

TABLE_KEY = "token_frequencies"


@full_precision
def supervised_routing_loss(
    logits_TE: Tensor,
    token_ids_T: Tensor,
    token_frequencies_VE: Tensor,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of ``softmax(logits)`` against the token's frequencies, in nats per token.

    Args:
        logits_TE: router logits before the score function.
        token_ids_T: vocabulary id of each token.
        token_frequencies_VE: share of each vocabulary entry's occurrences in every expert's data;
            rows sum to 1. Carries no gradient.
        mask_T: True where a token counts; None counts all.

    Raises:
        ValueError: for wrong shapes.

    Source: *Supervised Routing for MoE* (P3), §3.2. The paper sums over the batch's tokens; this is
    their mean, so the gradient does not grow with the batch.
    """
    check_shapes(
        logits_TE=logits_TE,
        token_ids_T=token_ids_T,
        token_frequencies_VE=token_frequencies_VE,
        mask_T=mask_T,
    )
    logits_TE = counted(logits_TE, mask_T)
    wanted_TE = token_frequencies_VE.detach().index_select(0, blank(token_ids_T, mask_T))
    entropy_T = -(wanted_TE.to(logits_TE.dtype) * logits_TE.log_softmax(-1)).sum(-1)
    return mean_over_tokens(entropy_T, mask_T)


def load_token_frequencies(path: str | Path) -> Tensor:
    """Read a (V, E) float32 table from the ``token_frequencies`` tensor of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    key = f"method.terms.supervised_routing.table: {path}"
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ObjectiveError(
            f"{key} does not exist; create it with `moe-finetune upcycle`"
        ) from None
    except (OSError, SafetensorError) as error:
        raise ObjectiveError(f"{key} cannot be read as a safetensors file: {error}") from None
    if TABLE_KEY not in tensors:
        raise ObjectiveError(f"{key} contains {sorted(tensors)}, expected the tensor '{TABLE_KEY}'")
    table_VE = tensors[TABLE_KEY].float()
    if table_VE.dim() != 2:
        got = tuple(table_VE.shape)
        raise ObjectiveError(f"{key}: '{TABLE_KEY}' has shape {got}, expected (tokens, experts)")
    wrong_V = ~((table_VE.sum(-1) - 1.0).abs() < 1e-3) | (table_VE < 0).any(-1)
    if wrong_V.any():
        token = int(wrong_V.nonzero()[0])
        raise ObjectiveError(
            f"{key}: row {token} is not a distribution (sum {float(table_VE[token].sum()):.4g}, "
            f"least {float(table_VE[token].min()):.4g}); every row must be >= 0 and sum to 1"
        )
    return table_VE


class SupervisedRoutingOptions(TermOptions):
    """``table``: safetensors file with the tensor ``token_frequencies`` (V, E)."""

    table: str | None = Field(
        default=None, description="safetensors file with `token_frequencies` (tokens, experts)"
    )

    @model_validator(mode="after")
    def _table_is_there(self) -> SupervisedRoutingOptions:
        if not self.removed and self.table is None:
            raise ValueError("supervised_routing needs `table:`, a file of token frequencies")
        return self


class SupervisedRouting(Term):
    """``supervised_routing``: cross-entropy of the router against token frequencies."""

    name = "supervised_routing"
    source = "P3 §3.2"
    reads = "router logits and token ids"
    trains = frozenset({"router"})
    selection = True
    Options = SupervisedRoutingOptions
    options: SupervisedRoutingOptions

    def __init__(self, options: SupervisedRoutingOptions):
        super().__init__(options)
        self._table_VE = load_token_frequencies(str(options.table))

    def check(self, facts: ModelFacts) -> None:
        """Refuse a table with a different vocabulary or number of experts."""
        super().check(facts)
        model_shape = (facts.vocab_size, facts.num_experts)
        if tuple(self._table_VE.shape) != model_shape:
            raise ObjectiveError(
                f"method.terms.supervised_routing.table: {self.options.table} has "
                f"{self._table_VE.shape[0]} tokens and {self._table_VE.shape[1]} experts, but "
                f"this model has {model_shape[0]} and {model_shape[1]}"
            )

    def loss(self, record: RoutingRecord, context: LayerContext) -> Tensor:
        if record.token_ids_T is None:
            raise ObjectiveError(
                "method.terms.supervised_routing reads token ids, but the model was called with "
                "embeddings; call it with input_ids"
            )
        device = record.logits_TE.device
        if self._table_VE.device != device:
            self._table_VE = self._table_VE.to(device)
        return supervised_routing_loss(
            record.logits_TE, record.token_ids_T, self._table_VE, record.mask_T
        )
