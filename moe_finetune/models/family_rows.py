"""Rows of the families' tables; a row states differences from the router of its kind."""

from collections.abc import Callable
from typing import Any

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.family import Family, expert_groups, require


def softmax(model_type: str, title: str, **facts: Any) -> Family:
    """Qwen's router: softmax, with selected scores renormalized if the config says so."""
    return _row(model_type, title, {"score": "softmax"} | facts)


def sigmoid(model_type: str, title: str, **facts: Any) -> Family:
    """DeepSeek-V3's router: sigmoid, a bias on the selection, groups, scaled weights."""
    standard = {
        "score": "sigmoid",
        "scaling": scaled(),
        "groups": expert_groups,
        "bias_export": "tensor",
    }
    return _row(model_type, title, standard | facts)


def granite(model_type: str, title: str, **facts: Any) -> Family:
    """IBM's Granite: the router returns its index first."""
    standard = {
        "score": "softmax",
        "router_returns": ("index", "weights", "logits"),
        "renormalize": yes,
    }
    return _row(model_type, title, standard | facts)


def _row(model_type: str, title: str, facts: dict[str, Any]) -> Family:
    return Family(**({"name": model_type, "model_type": model_type, "title": title} | facts))


def same_in_all_layers(name: str) -> Callable[[Any], int]:
    """The config's integer ``name``, which may be a list of equal values per layer."""

    def read(config: Any) -> int:
        value = getattr(config, name)
        numbers = set(value) if isinstance(value, list) else {value}
        if len(numbers) != 1:
            raise UnsupportedModelError(
                f"{config.model_type}: {name} differs by layer; only the same number for all "
                "layers is supported"
            )
        return int(numbers.pop())

    return read


def scaled(name: str = "routed_scaling_factor") -> Callable[[Any], float]:
    """The config's factor ``name``."""
    return lambda config: float(getattr(config, name))


def unscaled(config: Any) -> float:
    """Selected scores are not scaled."""
    return 1.0


def ungrouped(config: Any) -> tuple[int, int]:
    """All experts are one group."""
    return 1, 1


def limited_groups(config: Any) -> tuple[int, int]:
    """DeepSeek's groups, which ``topk_method: greedy`` ignores."""
    return (1, 1) if config.topk_method == "greedy" else expert_groups(config)


def requires(**supported_values: Any) -> Callable[[Any], None]:
    """:func:`require` of a config."""
    return lambda config: require(config, **supported_values)


def yes(config: Any) -> bool:
    """True for any config."""
    return True
