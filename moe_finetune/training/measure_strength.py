"""Measure the strength of a method's terms without training."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import ObjectiveError
from moe_finetune.moe.layers import in_mode
from moe_finetune.recipe.method import resolve_method
from moe_finetune.training.specialization import Specialization


def measure_strength(
    model: nn.Module, method: Any, batches: Iterable[Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    """Measure the strength of each of ``method``'s terms on one window, without training.

    Args:
        model: a supported causal language model, with or without PEFT; parameters to train have
            ``requires_grad`` set.
        method: a preset's name, a ``method:`` mapping, or a resolved method. A share is converted
            to the weight that gives it.
        batches: the window's micro-batches, each with ``labels``; the language loss is the mean
            over all tokens that have a label.

    Returns:
        One row per term: ``term``, ``weight``, ``share_router``, ``share_experts``,
            ``cosine_router``, ``cosine_experts`` (None if the part does not train) and
            ``weight_for_10_percent`` (None for a term without a gradient, such as a hinge that is
            met).

    Raises:
        ObjectiveError: there are no batches, a batch has no labels, or a term with a share has no
            gradient.
    """
    window = [dict(batch) for batch in batches]
    if not window or any(batch.get("labels") is None for batch in window):
        raise ObjectiveError("measure_strength needs at least one batch, each with labels")
    learned = [int((batch["labels"][:, 1:] != -100).sum()) for batch in window]
    method = resolve_method(method)
    measured = method.strength.model_copy(update={"first": True})
    method = method.model_copy(update={"strength": measured})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trainable]
    device = next(model.parameters()).device
    try:
        with (
            in_mode(model, train=True),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            Specialization(model, method, accumulation=len(window)) as specialization,
        ):
            for batch, tokens in zip(window, learned, strict=True):
                (model(**batch).loss * (tokens / max(sum(learned), 1))).backward()
            rows = specialization.strength.end()
            for row in rows:
                if (share := method.terms[row.term].share) is not None and not row.weight:  # type: ignore[attr-defined]
                    raise ObjectiveError(
                        f"method.terms.{row.term}.share: no weight gives it a share of {share:g} "
                        f"in the window: {row.missing}; give a weight instead, or remove the term"
                    )
            return [row.row() for row in rows]
    finally:
        for parameter, gradient in zip(trainable, gradients, strict=True):
            parameter.grad = gradient
