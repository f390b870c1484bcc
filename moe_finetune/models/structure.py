"""What transformers' own class says about a config: asked from the model on the meta device."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from moe_finetune.errors import CheckpointError, UnsupportedModelError

Shapes = dict[str, tuple[int, ...]]
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")


def layers_with_experts(config: Any) -> list[int]:
    """Decoder layers of ``config`` that hold routed experts, in order; takes no memory.

    Raises:
        UnsupportedModelError: none does.
    """
    found = _layers(config.model_type, _text(config.to_dict()))
    if not found:
        raise UnsupportedModelError(f"this {config.model_type} config has no layer with experts")
    return list(found)


@functools.lru_cache(maxsize=64)
def _layers(model_type: str, text: str) -> tuple[int, ...]:
    found = {
        int(match[1])
        for name, module in _on_meta(model_type, text).named_modules()
        if (match := _EXPERTS.search(name)) and hasattr(module, "has_gate")
    }
    return tuple(sorted(found))


def name_on_disk(config: Mapping[str, Any], name: str) -> str:
    """What the files of a checkpoint call the loaded model's tensor ``name``.

    Args:
        config: the content of ``config.json``.
        name: a tensor that one tensor of the files becomes; any other comes back as it is.
    """
    names = list(pieces_on_disk(config, name))
    return names[0] if len(names) == 1 else name


def pieces_on_disk(config: Mapping[str, Any], name: str) -> Shapes:
    """The tensors of the files that the loaded model's tensor ``name`` is made of, with shapes.

    Empty for a name that the model does not have.
    """
    from transformers.core_model_loading import revert_weight_conversion

    key = (config["model_type"], _text(config))
    known, tensor = _known_pieces(*key), _state(*key).get(name)
    if tensor is None:
        return {}
    if name not in known:
        found = revert_weight_conversion(_on_meta(*key), {name: tensor})
        known[name] = {piece: tuple(part.shape) for piece, part in found.items()}
    return dict(known[name])


def loaded_shape(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Shape of the loaded model's tensor ``name``."""
    return tuple(_state(config["model_type"], _text(config))[name].shape)


def patterns_on_disk(config: Mapping[str, Any], name: str) -> list[str]:
    """Like :func:`name_on_disk` for a layer's stack, which may be many tensors in the files.

    Returns:
        their names with ``{layer}`` and ``{expert}``, each pattern once, in the stack's order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta(config["model_type"], _text(config))
    names = revert_weight_conversion(model, {name: model.state_dict()[name]})
    return list(dict.fromkeys(_pattern(found) for found in names))


def _pattern(name: str) -> str:
    numbers = iter(("{layer}", "{expert}"))
    return ".".join(next(numbers) if part.isdigit() else part for part in name.split("."))


def shapes_on_disk(config: Any) -> Shapes:
    """Name and shape of every tensor in the files of a checkpoint with ``config``."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta(config.model_type, _text(config.to_dict()))
    state = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def integers_on_disk(config: Any) -> frozenset[str]:
    """Names of the tensors of whole numbers in the files, such as tables of experts by token."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta(config.model_type, _text(config.to_dict()))
    state = {n: t for n, t in model.state_dict().items() if not t.is_floating_point()}
    return frozenset(revert_weight_conversion(model, state)) if state else frozenset()


def ignored_names(config: Any) -> tuple[str, ...]:
    """Patterns of the tensors that transformers' class of ``config``, or a part of it, ignores."""
    model = _on_meta(config.model_type, _text(config.to_dict()))
    return tuple(sorted(model._keys_to_ignore_on_load_unexpected or ()))


def renamed_as_loaded(config: Any, name: str) -> str:
    """What transformers calls the files' tensor ``name`` while it loads them."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    model = _on_meta(config.model_type, _text(config.to_dict()))
    changes = model._weight_conversions
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    return rename_source_key(name, renamings, [])[0]


def _text(config: Mapping[str, Any]) -> str:
    """The config without what neither names nor shapes depend on: one model serves them all."""
    kept = {key: value for key, value in config.items() if key not in _IDLE}
    return json.dumps(kept, sort_keys=True, default=str)


_IDLE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


@functools.lru_cache(maxsize=8)
def _on_meta(model_type: str, text: str) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = json.loads(text, object_hook=_special_float)
    model = meta_model(CONFIG_MAPPING[model_type].from_dict(config))
    # What transformers looks up for a model made of a config, else anew for each name.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
    return model


@functools.lru_cache(maxsize=8)
def _state(model_type: str, text: str) -> dict[str, Any]:
    return _on_meta(model_type, text).state_dict()


@functools.lru_cache(maxsize=8)
def _known_pieces(model_type: str, text: str) -> dict[str, Shapes]:
    """What :func:`pieces_on_disk` has found so far."""
    return {}


def _special_float(entry: dict[str, Any]) -> Any:
    """Infinity and NaN as transformers writes them into a config.json, which JSON lacks."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def class_of(config: Any) -> Any:
    """transformers' auto class of the whole model of ``config``, vision part included.

    For a language part that exists in a composite alone, the class without a head.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if config.get_text_config() is not config:
        return AutoModelForImageTextToText
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING
    return AutoModelForCausalLM if alone else AutoModel


def meta_model(config: Any, attn_implementation: str | None = None) -> Any:
    """The model of ``config`` on the meta device: names and shapes, no memory.

    Raises:
        CheckpointError: the config's values describe no model that can be built.
    """
    import torch

    try:
        with torch.device("meta"):
            return class_of(config).from_config(
                config, dtype=torch.bfloat16, attn_implementation=attn_implementation
            )
    except Exception as error:  # any, out of any library's constructor
        raise CheckpointError(
            f"config.json of this {config.model_type} describes no model that can be built: "
            f"{first_line(error)}; restore the checkpoint's own config.json"
        ) from error


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__
