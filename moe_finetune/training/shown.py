"""The logged values that a terminal shows: order, names and number format."""

import math
from collections.abc import Iterable

from moe_finetune.metrics.words import word

_OBJECTIVES = ("reward", "rewards/accuracies", "rewards/margins", "loss")
_SHOWN = (
    *(head + name for name in _OBJECTIVES for head in ("", "eval_")),
    *("losses/", "routing/max_violation", "routing/entropy"),
)


def ordered(keys: Iterable[str]) -> list[str]:
    """Keys to show, in the order of the table."""
    names = list(keys)
    return [
        key
        for pattern in _SHOWN
        for key in names
        if key == pattern or (pattern.endswith("/") and key.startswith(pattern))
    ]


def name(key: str) -> str:
    """A logged value's name on a terminal."""
    if key.startswith("losses/"):
        return key.removeprefix("losses/").replace("_", " ")
    if key.removeprefix("eval_") in _OBJECTIVES and key != "loss":
        return word(key).name.lower()
    return {"loss": "loss", "routing/entropy": "entropy"}.get(key, word(key).name)


def number(value: float) -> str:
    """The value with four digits."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)
