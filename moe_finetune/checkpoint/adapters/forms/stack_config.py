"""What a config says of the stacks that other programs' forms make: layers, ranks and scales.

Which modules the adapter changes is read from its tensors, not from the config.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from moe_finetune.checkpoint.adapters.files import CONFIG, Adapter
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.errors import AdapterError

_NOT_READ = ("exclude_modules", "layers_pattern")
"""Keys with which PEFT would change other modules than those of the tensors."""


def check_config(stored: Adapter, base: Checkpoint, adapted: set[int]) -> None:
    """Refuse keys that contradict the tensors, which change the experts of the layers ``adapted``.

    Layers in the config must be layers of the base, and all of those.
    """
    for key in _NOT_READ:
        if stored.config.get(key):
            raise AdapterError(
                f"{stored.folder / CONFIG}: {key} is {stored.config[key]!r:.60}, which this form "
                "does not read: all modules that have factors change. Remove the key, or save the "
                "adapter with PEFT"
            )
    _check_layers(stored, base, adapted)


def _check_layers(stored: Adapter, base: Checkpoint, adapted: set[int]) -> None:
    chosen, where = stored.config.get("layers_to_transform"), stored.folder / CONFIG
    if chosen is None or chosen == []:  # of either, PEFT reads all layers
        return
    listed = chosen if isinstance(chosen, list) else [chosen]
    layers = range(base.model_config.get_text_config().num_hidden_layers)
    if wrong := [layer for layer in listed if type(layer) is not int or layer not in layers]:
        raise AdapterError(
            f"{where}: layers_to_transform has {wrong[0]!r}, which is no layer from 0 to "
            f"{layers[-1]}; list the numbers of layers"
        )
    if other := sorted(adapted - {*listed}):
        raise AdapterError(
            f"{where}: layers_to_transform lacks layer {other[0]}, which has factors; add it, or "
            "remove the key"
        )


def chosen_layers(stored: Adapter, layers: Iterable[int]) -> list[int]:
    """Those of ``layers`` that the config has."""
    chosen = stored.config.get("layers_to_transform")
    only = {chosen} if isinstance(chosen, int) else set(chosen or layers)
    return [layer for layer in layers if layer in only]


def pattern_of(stored: Adapter, option: str, key: str, default: Any) -> Any:
    """What ``rank_pattern`` or ``alpha_pattern`` has for a key, by PEFT's rule."""
    from peft.utils.other import get_pattern_key

    patterns = stored.config.get(option) or {}
    return patterns.get(get_pattern_key(list(patterns), key.partition(".lora_")[0]), default)


def scale_of(stored: Adapter, key: str, rank: int) -> float:
    """The factor of ``B @ A`` of the pair to which ``key`` belongs."""
    alpha = pattern_of(stored, "alpha_pattern", key, stored.config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if stored.config.get("use_rslora") else rank)


def check_one_pattern(stored: Adapter, keys: Sequence[str]) -> None:
    """Refuse a rank or alpha of the config that only some factors of a projection match."""
    for option in ("rank_pattern", "alpha_pattern"):
        first = pattern_of(stored, option, keys[0], None)
        for key in keys[1:]:
            if (own := pattern_of(stored, option, key, None)) != first:
                raise tensor_error(
                    stored,
                    key,
                    f"{option} of {CONFIG} says {own}, and {first} of '{keys[0]}', but all "
                    "experts of a projection have one; correct the pattern",
                )


def tensor_error(stored: Adapter, key: str, problem: str) -> AdapterError:
    """The error of a tensor, with the adapter's folder."""
    return AdapterError(f"{stored.folder}: adapter tensor '{key}': {problem}")
