"""Facts about a config, read from transformers' own class on the meta device."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from moe_finetune.errors import CheckpointError, UnsupportedModelError

Shapes = dict[str, tuple[int, ...]]


_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")


def layers_with_experts(config: Any) -> list[int]:
    """Decoder layers of ``config`` with routed experts, in order; takes no memory.

    Raises:
        UnsupportedModelError: no layer has routed experts.
    """
    layers = _layers(config.model_type, _text(config.to_dict()))
    if not layers:
        raise UnsupportedModelError(f"this {config.model_type} config has no layer with experts")
    return list(layers)


@functools.lru_cache(maxsize=64)
def _layers(model_type: str, text: str) -> tuple[int, ...]:
    layers = {
        int(match[1])
        for name, module in _on_meta(model_type, text).named_modules()
        if (match := _EXPERTS.search(name)) and hasattr(module, "has_gate")
    }
    return tuple(sorted(layers))


def patterns_on_disk(config: Mapping[str, Any], name: str) -> list[str]:
    """Names in the files of a tensor of the loaded model; a layer's stack may be many tensors.

    Returns:
        names with ``{layer}`` and ``{expert}``, each pattern once, in the stack's order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta(config["model_type"], _text(config))
    names = revert_weight_conversion(model, {name: model.state_dict()[name]})
    return list(dict.fromkeys(pattern_of(stored_name) for stored_name in names))


def pattern_of(name: str) -> str:
    """A tensor's name with ``{layer}`` and ``{expert}`` for its first numbers."""
    numbers = iter(("{layer}", "{expert}"))
    return ".".join(next(numbers, part) if part.isdigit() else part for part in name.split("."))


def shapes_on_disk(config: Any) -> Shapes:
    """Name and shape of every tensor in the files of a checkpoint that the class saves."""
    from transformers.core_model_loading import revert_weight_conversion

    model = without_weights(config)
    stored = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def without_weights(config: Any) -> Any:
    """The model of ``config`` on the meta device, the same object for equal configs.

    Raises:
        CheckpointError: see :func:`meta_model`.
    """
    return _on_meta(config.model_type, _text(config.to_dict()))


def ignored_names(config: Any) -> tuple[str, ...]:
    """Patterns of the tensors that transformers' class of ``config``, or a part of it, ignores."""
    return tuple(sorted(without_weights(config)._keys_to_ignore_on_load_unexpected or ()))


def _text(config: Mapping[str, Any]) -> str:
    """The config without keys that do not affect names and shapes, as a cache key."""
    relevant = {key: value for key, value in config.items() if key not in _IDLE}
    return json.dumps(relevant, sort_keys=True, default=str)


_IDLE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


@functools.lru_cache(maxsize=8)
def _on_meta(model_type: str, text: str) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = json.loads(text, object_hook=_special_float)
    model = meta_model(CONFIG_MAPPING[model_type].from_dict(config))
    # What transformers looks up for a model built from a config, cached for all names.
    changes = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [c for c in changes if not isinstance(c, PrefixChange)]
    return model


def _special_float(entry: dict[str, Any]) -> Any:
    """Infinity and NaN as transformers writes them into a config.json, which JSON lacks."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def class_of(config: Any) -> Any:
    """transformers' auto class for the whole model of ``config``, vision part included.

    For a language part that exists only in a composite, the class without a head.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if config.get_text_config() is not config:
        return AutoModelForImageTextToText
    has_head = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING
    return AutoModelForCausalLM if has_head else AutoModel


def meta_model(config: Any, attn_implementation: str | None = None) -> Any:
    """The model of ``config`` on the meta device: names and shapes, no memory.

    Raises:
        CheckpointError: no model can be built from the config's values.
    """
    import torch

    try:
        with torch.device("meta"):
            return class_of(config).from_config(
                config, dtype=torch.bfloat16, attn_implementation=attn_implementation
            )
    except Exception as error:  # any library's constructor may raise anything
        raise CheckpointError(
            f"config.json of this {config.model_type} does not describe a valid model: "
            f"{first_line(error)}; restore the checkpoint's own config.json"
        ) from error


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
