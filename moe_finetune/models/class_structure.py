"""Facts that transformers' own class shows: where experts and routers are, names, sizes."""

import functools
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_finetune.errors import CheckpointError, reason_of

_EXPERTS = re.compile(r"(?P<stack>(?:^|.*\.)layers)\.(?P<layer>\d+)\.(?P<path>.+)")
ROUTERS = ("gate", "router")
"""Names of routers in their blocks."""
MOST_SHARED = 8
"""Rows of a router's weight after those of the routed experts."""
_FLAGS = ("has_gate", "has_bias", "is_transposed")
_OF_THE_DECORATOR = ("experts_class", "experts_interface", "is_concatenated", *_FLAGS)


@dataclass(frozen=True)
class Site:
    """One layer's experts.

    Attributes:
        stack: path of the decoder layers.
        block_path, experts_name: paths of the block in the layer and of the experts in the block.
        gated: whether they have a gate projection.
        hidden: width of the decoder, which the router reads.
        num_experts, inner, width: sizes of the stacked down projection (E, H, D); ``inner`` is not
            ``hidden`` where experts have a space of their own.
    """

    index: int
    stack: str
    layer: Any
    block_path: str
    experts_name: str
    gated: bool
    hidden: int
    num_experts: int
    inner: int
    width: int

    @property
    def block(self) -> Any:
        """The module that contains router and experts."""
        return self.layer.get_submodule(self.block_path)

    @property
    def routers(self) -> list[tuple[str, str]]:
        """(name in the block, path of its weight) for each module with an (E, H) weight.

        Some weights have extra rows for shared experts at the end. If several have the shape, such
        as a shared expert's with as many rows, only those of :data:`ROUTERS` count.
        """
        candidates = [
            (parts[0], parts[2], parameter.shape[0])
            for name, parameter in self.block.named_parameters()
            if parameter.dim() == 2
            and parameter.shape[1] == self.hidden
            and 0 <= parameter.shape[0] - self.num_experts <= MOST_SHARED
            and (parts := name.partition("."))[0] != self.experts_name
            and parts[2]
        ]
        fewest = min((rows for *_, rows in candidates), default=0)
        smallest = [(name, path) for name, path, rows in candidates if rows == fewest]
        return [router for router in smallest if router[0] in ROUTERS] or smallest

    @property
    def biases(self) -> list[str]:
        """Names of the block's vectors with one number per expert, except the routers' biases."""
        tensors = [*self.block.named_parameters(), *self.block.named_buffers()]
        return [
            name
            for name, tensor in tensors
            if tensor.shape[-1:].numel() == tensor.numel() == self.num_experts
            and not name.endswith(".bias")
        ]


def linears(module: Any) -> list[tuple[str, Any]]:
    """Path and weight of each linear layer in ``module``."""
    from torch.nn import Linear

    modules = module.named_modules()
    return [(name, inner.weight) for name, inner in modules if isinstance(inner, Linear)]


def sites(model: Any) -> list[Site]:
    """Every layer of ``model`` with experts that follow transformers' experts interface."""
    modules = dict(model.named_modules())
    hidden, layer_sites = model.config.get_text_config().hidden_size, []
    for name, experts in modules.items():
        match = _EXPERTS.fullmatch(name)
        if match is None or not follows_interface(experts):
            continue
        size, first, second = experts.down_proj.shape
        inner, width = (second, first) if experts.is_transposed else (first, second)
        block, _, experts_name = match["path"].rpartition(".")
        stack, index = match["stack"], int(match["layer"])
        site = Site(
            *(index, stack, modules[f"{stack}.{index}"], block, experts_name, experts.has_gate),
            *(hidden, size, inner, width),
        )
        layer_sites.append(site)
    return sorted(layer_sites, key=lambda site: site.index)


def follows_interface(module: Any) -> bool:
    """Whether ``module`` is an experts class that can run here."""
    return (
        all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS)
        and getattr(getattr(module, "down_proj", None), "ndim", 0) == 3
        and not unknown_flags(module)
    )


def unknown_flags(experts: Any) -> list[str]:
    """Flags of transformers' experts interface that ``experts`` set and the products here ignore.

    Such as ``has_post_expert_norm`` from 5.20 on, a norm on each expert's output.
    """
    from transformers.integrations.moe import use_experts_implementation

    return [
        name
        for name, flag in inspect.signature(use_experts_implementation).parameters.items()
        if name not in _OF_THE_DECORATOR and getattr(experts, name, flag.default) != flag.default
    ]


def patterns_on_disk(config: Mapping[str, Any], name: str) -> list[str]:
    """Names in the files of a tensor of the loaded model; a layer's stack may be many tensors.

    Returns:
        names with ``{layer}`` and ``{expert}``, each pattern once, in the stack's order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model = on_meta(config["model_type"], text_of(config))
    names = revert_weight_conversion(model, {name: model.state_dict()[name]})
    patterns = []
    for stored in names:
        numbers = iter(("{layer}", "{expert}"))
        parts = (next(numbers, part) if part.isdigit() else part for part in stored.split("."))
        patterns.append(".".join(parts))
    return list(dict.fromkeys(patterns))


def shapes_on_disk(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the files of a checkpoint that the class saves."""
    from transformers.core_model_loading import revert_weight_conversion

    model = without_weights(config)
    stored = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def without_weights(config: Any) -> Any:
    """The model of ``config`` on the meta device, the same object for equal configs."""
    return on_meta(config.model_type, text_of(config.to_dict()))


def ignored_names(config: Any) -> tuple[str, ...]:
    """Patterns of the tensors that transformers' class of ``config``, or a part of it, ignores."""
    return tuple(sorted(without_weights(config)._keys_to_ignore_on_load_unexpected or ()))


def text_of(config: Mapping[str, Any]) -> str:
    """The config without keys that do not affect names and shapes, as a cache key."""
    relevant = {key: value for key, value in config.items() if key not in _IDLE}
    return json.dumps(relevant, sort_keys=True, default=str)


_IDLE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


@functools.lru_cache(maxsize=8)
def on_meta(model_type: str, text: str) -> Any:
    """The model of a config that :func:`text_of` wrote, on the meta device."""
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
    """The model of ``config`` on the meta device: names and shapes, no memory."""
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
    kind, reason = type(error).__name__, reason_of(error)
    return kind if reason == kind else f"{kind}: {reason:.300}"


def part_of(config: Any) -> str | None:
    """The ``model_type`` of the language part of a config or ``config.json``; None without one.

    For a ``config.json`` also None if only the composite's class names the part.
    """
    if isinstance(config, Mapping):
        text = config.get("text_config")
        return text.get("model_type") if isinstance(text, Mapping) else None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return None if text is config else str(text.model_type)
