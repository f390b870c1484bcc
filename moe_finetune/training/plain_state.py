"""Nested state as JSON and tensors, so that no checkpoint needs pickle.

``pack`` takes the tensors out of dictionaries, lists and tuples and leaves their names behind;
``unpack`` puts them back. Everything else must be a plain value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_finetune.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


def pack(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """JSON value of ``value``; its tensors go into ``tensors`` under names that start ``place``.

    Raises:
        CheckpointError: something is neither a plain value nor a tensor.
    """
    if isinstance(value, Tensor):
        tensors[place] = value
        return {_TENSOR: place}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        items = {key: pack(held, tensors, f"{place}/{key}") for key, held in value.items()}
        if all(isinstance(key, str) for key in items):
            return items
        return {_ITEMS: [[key, held] for key, held in items.items()]}
    if isinstance(value, list | tuple):
        parts = [pack(held, tensors, f"{place}/{i}") for i, held in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    raise CheckpointError(
        f"{place}: a {type(value).__name__} cannot be saved without pickle; use an optimizer and "
        "scheduler whose state is numbers and tensors"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What :func:`pack` was given."""
    if isinstance(value, list):
        return [unpack(held, tensors) for held in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(unpack(held, tensors) for held in value[_TUPLE])
    if _ITEMS in value:
        return {key: unpack(held, tensors) for key, held in value[_ITEMS]}
    return {key: unpack(held, tensors) for key, held in value.items()}
