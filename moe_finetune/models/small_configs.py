"""Small configs of a checkpoint's model type that run anywhere."""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from moe_finetune.errors import NoSmallModelError
from moe_finetune.models.class_structure import class_of, meta_model, sites
from moe_finetune.models.family import TOP_K, Family

SMALL = 20_000_000
"""Number of parameters up to which a model is used unchanged."""

_TOWER = 2
_LAYERS = (4, 6, 9, 16)
_WIDTHS = (72, 40, 56, 88, 104)


def shrunk_config(config: Any, family: Family) -> Any:
    """``config`` itself if its model is small, else one with fewer and narrower layers.

    Expert groups, head sizes, kinds of layers and everything that is not a size are unchanged. If
    16 layers suffice for it, the model has every class of decoder layer with experts, and two such
    layers that follow each other, as the whole one has.
    """
    full_model = meta_model(config)
    if sum(p.numel() for p in full_model.parameters()) <= SMALL:
        return config
    problem: Exception | None = None
    running: Any = None
    for changes in _attempts(config, family):
        try:
            smaller = changed(config, changes)
            model = meta_model(smaller)
            size = sum(p.numel() for p in model.parameters())
            complete = _kinds(model) >= _kinds(full_model)
            if running is not None and not complete:
                continue
            if size <= 20 * SMALL and len(sites(model)) >= 2 and _runs(smaller):
                if complete:
                    return smaller
                running = smaller
        except Exception as error:  # the class may raise anything for sizes that it rejects
            problem = error
    if running is not None:
        return running
    reason = "" if problem is None else f" ({problem})"
    raise NoSmallModelError(
        f"this config.json cannot be reduced to a small {config.model_type} for comparison"
        f"{reason}; give a small checkpoint of the same type"
    )


def _kinds(model: Any) -> set[Any]:
    """Classes of the decoder layers with experts, and whether two of them are adjacent."""
    moe_sites = sites(model)
    adjacent = {b.index - a.index for a, b in pairwise(moe_sites)} & {1}
    return {type(site.layer) for site in moe_sites} | adjacent


def first_layers(config: Any, first_moe: int) -> int:
    """How many first layers contain the layer ``first_moe`` and, in hybrids, some attention."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    recurrent = ("linear", "mamba", "conv", "recurrent", "moe", "mlp")
    attending = (n for n, kind in enumerate(kinds) if not any(word in kind for word in recurrent))
    first = next(attending, 0)
    return 1 + max(first, first_moe)


def of_first_layers(config: Any, count: int) -> Any:
    """``config`` with only its first ``count`` layers."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    for key, value in _of_layers(text, range(count)).items():
        setattr(text, key, value)
    return short


def _of_layers(text: Any, kept: Sequence[int]) -> dict[str, Any]:
    """Changes that reduce a language model to the layers ``kept``, with their entries of lists."""
    changes: dict[str, Any] = {"num_hidden_layers": len(kept)}
    values = text.to_dict()
    for key, value in values.items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            changes[key] = [value[layer] for layer in kept]
    if values.get("per_layer_config") is not None:
        by_layer = {int(layer): value for layer, value in values["per_layer_config"].items()}
        changes["per_layer_config"] = {
            new: by_layer[layer] for new, layer in enumerate(kept) if layer in by_layer
        }
    return changes


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """A config of the same type with ``changes`` in its language part."""
    plain = config.to_dict()
    part = plain.get("text_config", plain)
    part.update(changes)
    for key, tower in plain.items():
        if key.endswith("_config") and isinstance(tower, dict) and tower is not part:
            _shallow(tower)
    return type(config).from_dict(plain)


def _shallow(tower: dict[str, Any]) -> None:
    """Reduce a vision or audio tower, which text does not use, to two layers."""
    for key in ("depth", "num_hidden_layers", "encoder_layers"):
        depth = tower.get(key)
        if not isinstance(depth, int) or depth <= _TOWER:
            continue
        tower[key] = _TOWER
        for name, value in tower.items():
            if isinstance(value, list | tuple) and len(value) == depth:
                tower[name] = value[:_TOWER]
            elif isinstance(value, list | tuple) and "index" in name:
                tower[name] = [layer for layer in value if layer < _TOWER]
    for value in tower.values():
        if isinstance(value, dict):
            _shallow(value)


def _runs(config: Any) -> bool:
    model = class_of(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(4, 21)[None], use_cache=False).logits
    return bool(torch.isfinite(logits).all())


def _attempts(config: Any, family: Family) -> Iterator[dict[str, Any]]:
    """Changes of the language part's keys, the most reduced first."""
    text = config.get_text_config()
    experts = _fewer_experts(text, family)
    for layers in _LAYERS:
        if layers > text.num_hidden_layers:
            break
        deep = _fewer_layers(text, layers)
        yield deep | experts | _narrower(text) | _fewer_heads(text)
        yield deep | experts | _narrower(text)
        yield deep | experts


def _fewer_layers(text: Any, layers: int) -> dict[str, Any]:
    changes = _of_layers(text, range(layers))
    for key, value in text.to_dict().items():
        if key == "first_k_dense_replace" and value:
            changes[key] = 1
        elif isinstance(value, int) and key.endswith("layer_end_index") and value >= layers:
            changes[key] = layers - 1
    return changes


def _fewer_experts(text: Any, family: Family) -> dict[str, Any]:
    """Four experts per group, or ten without groups; at most three selected."""
    experts_before, selected = family.places(text).num_experts, family.top_k(text)
    plain = text.to_dict()
    groups, top_groups = family.groups(text)
    if groups == 1:  # if that is wrong, the class would not run with what no group fits
        groups, top_groups = int(plain.get("n_group") or 1), int(plain.get("topk_group") or 1)
    experts = min(experts_before, 4 * groups if groups > 1 else 10)
    top_k = min(selected, 3, top_groups * experts // groups - 1 if groups > 1 else 3)
    changes: dict[str, Any] = {}
    for key, value in plain.items():
        if "expert" in key and value == experts_before and value is not True:
            changes[key] = experts
        elif key in TOP_K and value == selected:
            changes[key] = top_k
    return changes


def _narrower(text: Any) -> dict[str, Any]:
    """Small widths, no two equal, and a small vocabulary."""
    plain, widths = text.to_dict(), iter(_WIDTHS)
    changes: dict[str, Any] = {"vocab_size": min(text.vocab_size, 320)}
    width_of: dict[int, int] = {}
    for key, value in plain.items():
        if "intermediate" in key and isinstance(value, int) and value > 128:
            changes[key] = width_of.setdefault(value, next(widths, 120))
        elif key.endswith("_token_id") and isinstance(value, int) and value >= 320:
            changes[key] = 3
    return changes


def _fewer_heads(text: Any) -> dict[str, Any]:
    plain = text.to_dict()
    heads, kv_heads = plain.get("num_attention_heads"), plain.get("num_key_value_heads")
    if not isinstance(heads, int):
        return {}
    changes: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 96}
    if isinstance(kv_heads, int):
        changes["num_key_value_heads"] = 4 if kv_heads == heads else 2
    if not plain.get("head_dim"):
        changes["hidden_size"] = 4 * (text.hidden_size // heads)
    for key, rank in (("kv_lora_rank", 44), ("q_lora_rank", 28)):
        if isinstance(plain.get(key), int):
            changes[key] = rank
    return changes
