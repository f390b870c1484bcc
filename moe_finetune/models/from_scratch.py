"""Models from scratch: a checkpoint's config with changed sizes, and random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError, RecipeError, did_you_mean
from moe_finetune.io.check_config import check_config
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.models import Family, check_supported
from moe_finetune.models.class_structure import class_of
from moe_finetune.models.config_and_tokenizer import local_folder, open_config
from moe_finetune.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FIXED = ("model_type", "architectures", "auto_map", "quantization_config")
# Lists with one entry a layer, which transformers makes from the other keys.
_PER_LAYER = ("layer_types",)


def fresh_config(path: str | Path, changes: Mapping[str, Any]) -> tuple[PreTrainedConfig, Family]:
    """The config of a folder or hub id with some keys changed, and its family; no weights are
    needed."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    raw = read_config(local_folder(path, weights=False))
    base, family = open_config(path)
    # A few keys have two names: transformers 5 writes the one, published files have the other.
    real = base.attribute_map
    keys = (raw.keys() | base.to_dict().keys() | real.keys()) - set(FIXED)
    for key, value in changes.items():
        if key not in keys:
            raise RecipeError(
                f"model.config.{key}: cannot be changed in {base.model_type}'s "
                f"config{did_you_mean(str(key), keys)}"
            )
        expected_type = _kind(getattr(base, key, None))
        if value is not None and expected_type is not None and not isinstance(value, expected_type):
            raise RecipeError(
                f"model.config.{key}: must be a value such as {getattr(base, key)!r}, not {value!r}"
            )
    values = {real.get(key, key): value for key, value in [*raw.items(), *changes.items()]}
    check_config(values, "model.config")
    for key in ("auto_map", "architectures", "model_type", *_PER_LAYER):
        values.pop(key, None)
    try:
        config = AutoConfig.for_model(base.model_type, **values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise RecipeError(f"model.config: {base.model_type} rejects it: {error}") from error
    try:
        check_supported(config, family)
    except CheckpointError as error:
        raise RecipeError(
            f"model.config: {base.model_type} cannot be built: {error.__cause__ or error}"
        ) from error
    experts, selected = family.places(config).num_experts, family.top_k(config)
    if not 1 <= selected <= experts:
        raise RecipeError(f"model.config: cannot select {selected} of {experts} experts")
    return config, family


def _kind(value: Any) -> type | tuple[type, ...] | None:
    """The type that a key's new value must have; None if the old value is null."""
    if value is None:
        return None
    return (int, float) if isinstance(value, float) else type(value)


def fresh_model(
    config: PreTrainedConfig, seed: int, attn_implementation: str | None = None
) -> PreTrainedModel:
    """A model of ``config`` with random float32 weights, initialized by its class."""
    import torch
    from transformers import set_seed

    set_seed(seed)
    try:
        model = class_of(config).from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        )
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(f"model.config: {config.model_type} cannot be built: {error}") from error
    return model


def check_vocabulary(config: PreTrainedConfig, tokenizer: Tokenizer, path: str | Path) -> None:
    """Raise if the tokenizer of ``path`` has ids that the model's embedding lacks."""
    tokens = len(tokenizer)
    size = config.get_text_config().vocab_size
    if tokens > size:
        raise CheckpointError(
            f"{path}: its tokenizer has {tokens} tokens, but the config's vocab_size is {size}; "
            "raise model.config.vocab_size, or choose another model.tokenizer"
        )
