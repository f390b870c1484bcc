"""Facts about a config, read from transformers' own class on the meta device."""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_finetune.errors import CheckpointError, UnsupportedModelError

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Spelling:
    """Tensor names in files, where they differ from those that the model's class saves.

    Attributes:
        unconverted: positions of transformers' conversions whose results the files already contain.
        renamed: names as saved and in the files, with ``#`` for every number.
    """

    unconverted: tuple[int, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")
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


def name_on_disk(config: Mapping[str, Any], name: str, spelling: Spelling | None = None) -> str:
    """The name of the loaded model's tensor ``name`` in a checkpoint's files.

    Args:
        config: the content of ``config.json``. name: a tensor that corresponds to one tensor of the
            files; any other is returned unchanged.
        spelling: the files' spelling; None if names are as the class saves them.
    """
    names = list(pieces_on_disk(config, name, spelling))
    return names[0] if len(names) == 1 else name


def pieces_on_disk(
    config: Mapping[str, Any], name: str, spelling: Spelling | None = None
) -> Shapes:
    """The files' tensors, with shapes, that form the loaded model's tensor ``name``.

    Empty for a name that the model does not have.
    """
    key = (config["model_type"], _text(config))
    cache, tensor = _known_pieces(*key, spelling), _state(*key).get(name)
    if tensor is None:
        return {}
    if name not in cache:
        cache[name] = _in_files(key, {name: tensor}, spelling)
    return dict(cache[name])


def loaded_names(config: Mapping[str, Any]) -> Iterable[str]:
    """Names of the loaded model's tensors."""
    return _state(config["model_type"], _text(config)).keys()


def patterns_on_disk(config: Mapping[str, Any], name: str) -> list[str]:
    """Like :func:`name_on_disk` for a layer's stack, which may be many tensors in the files.

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


def shapes_on_disk(config: Any, spelling: Spelling | None = None) -> Shapes:
    """Name and shape of every tensor in the files of a checkpoint with ``config``."""
    key = (config.model_type, _text(config.to_dict()))
    return _in_files(key, _state(*key), spelling)


def integers_on_disk(config: Any, spelling: Spelling | None = None) -> frozenset[str]:
    """Names of integer tensors in the files, such as tables of experts by token."""
    key = (config.model_type, _text(config.to_dict()))
    state = {n: t for n, t in _state(*key).items() if not t.is_floating_point()}
    return frozenset(_in_files(key, state, spelling)) if state else frozenset()


def _in_files(key: tuple[str, str], state: dict[str, Any], spelling: Spelling | None) -> Shapes:
    """Name and shape in the files of each of the loaded tensors ``state``."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _on_meta(*key)
    standard, other = model._weight_conversions, {}
    if spelling is not None:
        other = dict(spelling.renamed)
        dropped = [_changes(*key)[index] for index in spelling.unconverted]
        model._weight_conversions = [c for c in standard if c not in dropped]
    try:
        stored = revert_weight_conversion(model, state)
    finally:
        model._weight_conversions = standard
    return {_respelled(name, other): tuple(tensor.shape) for name, tensor in stored.items()}


def _respelled(name: str, renamed: Mapping[str, str]) -> str:
    if name in renamed:
        return renamed[name]
    pattern = _NUMBER.sub("#", name) if renamed else name
    if pattern not in renamed:
        return name
    numbers = iter(_NUMBER.findall(name))
    return re.sub("#", lambda _: next(numbers), renamed[pattern])


def spelling_of(config: Any, names: Iterable[str]) -> Spelling | None:
    """The spelling of files with these ``names``; None if names are as the class saves them.

    Each name passes through transformers' own renaming, as when loading the file. Names that the
    model lacks, such as an MTP head's, are ignored.
    """
    key = (config.model_type, _text(config.to_dict()))
    state, changes = _state(*key), _changes(*key)
    head = f"{_on_meta(*key).base_model_prefix}."
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(_NUMBER.sub("#", name), []).append(name)
    # One name of each pattern stands for all: how would transformers load it?
    samples = []  # (file's name, loaded name, converter's number, as which of its sources)
    for alike in by_pattern.values():
        loaded, converter, source = _loaded(alike[0], changes)
        # Loaders add the prefix of the base model to names that lack it.
        loaded = loaded if loaded in state else head + loaded
        if loaded in state:
            samples.append((alike, loaded, converter, source))

    def saved(name: str, spelling: Spelling | None = None) -> list[str]:
        return list(_in_files(key, {name: state[name]}, spelling))

    # A tensor that loads without a converter is stored as in memory; where its class would save
    # pieces instead, the conversion to pieces was not applied to these files.
    stored_whole = [loaded for _, loaded, converter, _ in samples if converter is None]
    undone = {_loaded(piece, changes)[1] for name in stored_whole for piece in saved(name)[:1]}
    unconverted = Spelling(tuple(sorted(index for index in undone if index is not None)))
    # What is still called otherwise than the class saves it: by pattern where both names have as
    # many numbers, else name by name.
    renamed: dict[str, str] = {}
    for alike, loaded, converter, source in samples:
        if converter is None:
            usual = saved(loaded, unconverted)[0]
        else:
            usual = next(p for p in saved(loaded) if _loaded(p, changes)[2] == source)
        if usual == alike[0]:
            continue
        patterns = _NUMBER.sub("#", usual), _NUMBER.sub("#", alike[0])
        if patterns[0].count("#") == patterns[1].count("#"):
            renamed[patterns[0]] = patterns[1]
        else:
            renamed |= {saved(_loaded(n, changes)[0], unconverted)[0]: n for n in alike}
    spelling = replace(unconverted, renamed=tuple(sorted(renamed.items())))
    return None if spelling == Spelling() else spelling


def _loaded(name: str, changes: list[Any]) -> tuple[str, int | None, str | None]:
    """transformers' name for the files' tensor ``name``, its converter, and which source it is.

    The converter is its position in ``changes``.
    """
    from transformers.core_model_loading import WeightConverter

    for change in changes:
        if not isinstance(change, WeightConverter):
            name = change.rename_source_key(name)[0]
    for index, change in enumerate(changes):
        if isinstance(change, WeightConverter):
            renamed, source = change.rename_source_key(name)
            if source is not None:
                return renamed, index, source
    return name, None, None


def _is_prefix(change: Any) -> bool:
    from transformers.core_model_loading import PrefixChange

    return isinstance(change, PrefixChange)


def ignored_names(config: Any) -> tuple[str, ...]:
    """Patterns of the tensors that transformers' class of ``config``, or a part of it, ignores."""
    model = _on_meta(config.model_type, _text(config.to_dict()))
    return tuple(sorted(model._keys_to_ignore_on_load_unexpected or ()))


def renamed_as_loaded(config: Any, name: str) -> str:
    """transformers' name for the files' tensor ``name`` on loading."""
    return _loaded(name, _changes(config.model_type, _text(config.to_dict())))[0]


def _text(config: Mapping[str, Any]) -> str:
    """The config without keys that do not affect names and shapes, as a cache key."""
    relevant = {key: value for key, value in config.items() if key not in _IDLE}
    return json.dumps(relevant, sort_keys=True, default=str)


_IDLE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


@functools.lru_cache(maxsize=8)
def _on_meta(model_type: str, text: str) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = json.loads(text, object_hook=_special_float)
    model = meta_model(CONFIG_MAPPING[model_type].from_dict(config))
    # What transformers looks up for a model built from a config, cached for all names.
    model.all_changes = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [c for c in model.all_changes if not _is_prefix(c)]
    return model


def _changes(model_type: str, text: str) -> list[Any]:
    """All of transformers' conversions, including those applied only on loading."""
    changes: list[Any] = _on_meta(model_type, text).all_changes
    return changes


@functools.lru_cache(maxsize=8)
def _state(model_type: str, text: str) -> dict[str, Any]:
    return _on_meta(model_type, text).state_dict()


@functools.lru_cache(maxsize=16)
def _known_pieces(model_type: str, text: str, spelling: Spelling | None) -> dict[str, Shapes]:
    """The cache of :func:`pieces_on_disk`."""
    return {}


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
