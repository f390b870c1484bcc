"""Which of a router's results is which."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

STANDARD = ("logits", "weights", "index")
"""The order of most classes; Granite, Aria and Jamba have it from transformers 5.21 on."""

_OVER_EXPERTS = ("logits", "probabilities")


def named_results(
    declared: Sequence[str], results: Sequence[Any], num_experts: int
) -> dict[str, Tensor] | None:
    """The results by name, in the order ``declared`` by the family or in :data:`STANDARD`.

    None if they fit neither. Only the index has integers, so an order is never mistaken for its
    reverse. What differs in meaning only, such as logits and probabilities, is decided by name.
    """
    for order in (declared, STANDARD):
        if len(order) == len(results) and all(isinstance(value, Tensor) for value in results):
            named = dict(zip(order, results, strict=True))
            if _fits(named, num_experts):
                return named
    return None


def _fits(named: dict[str, Tensor], num_experts: int) -> bool:
    """Whether dtypes and shapes are those of the names."""
    floating = {name for name, value in named.items() if value.is_floating_point()}
    if floating != named.keys() - {"index"}:
        return False
    over_experts = [named[name] for name in _OVER_EXPERTS if name in named]
    if any(value.shape[-1] != num_experts for value in over_experts):
        return False
    index, weights = named.get("index"), named.get("weights")
    return index is None or (weights is not None and weights.shape == index.shape)
