"""Metrics of one MoE layer from installed packages, and display names of metrics."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_finetune.errors import PluginError


@dataclass(frozen=True)
class Word:
    """A metric's display name, meaning, and good direction for specialized, balanced experts.

    ``good`` is +1 (higher is better), -1 (lower is better) or 0 (neither by itself).
    """

    name: str
    meaning: str = ""
    good: int = 0


INPUTS = (
    *("index_TK", "scores_TK", "scores_TE", "probabilities_TE", "router_weight_EH"),
    *("activations_gram_TKK", "outputs_gram_TKK"),
)
"""A layer's arrays that a metric can read, as numpy arrays; see :class:`RoutingRecord`."""


@dataclass(frozen=True)
class LayerMetric:
    """A metric with one number per MoE layer.

    Attributes:
        compute: a function whose parameters are names in :data:`INPUTS`; returns a number, or None
            if undefined. It is not called for a layer that lacks an input.
        word: its name in the report.
    """

    compute: Callable[..., float | None]
    word: Word

    def __call__(self, name: str, arrays: Mapping[str, Any]) -> float | None:
        """The value for one layer's arrays by name; None marks a missing input.

        Raises:
            PluginError: ``compute`` failed, or did not return a number.
        """
        chosen = {key: arrays[key] for key in inspect.signature(self.compute).parameters}
        if any(array is None for array in chosen.values()):
            return None
        try:
            value = self.compute(**chosen)
            result = None if value is None else float(value)
        except Exception as error:  # whatever the package's own code raises
            raise PluginError(f"metric '{name}' failed: {type(error).__name__}: {error}") from error
        if result is not None and not math.isfinite(result):
            raise PluginError(f"metric '{name}' returned {result}; return None where it has none")
        return result


def problem_of(value: object) -> str | None:
    """Why an entry point's value is not a metric, or None."""
    if not isinstance(value, LayerMetric):
        return f"is {value!r:.80}, and must be a moe_finetune.metrics.LayerMetric"
    try:
        parameters = inspect.signature(value.compute).parameters
    except (TypeError, ValueError):  # some builtins
        return f"computes with {value.compute!r:.80}, whose parameters cannot be read"
    unknown = [key for key in parameters if key not in INPUTS]
    if unknown:
        return f"reads '{unknown[0]}'; a metric can read {', '.join(INPUTS)}"
    return None
