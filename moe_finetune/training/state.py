"""State without pickle: tensors as safetensors in files or text, nested state as JSON.

``pack`` replaces tensors in dictionaries, lists and tuples with their names; ``unpack`` puts them
back. Everything else must be a plain value.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from moe_finetune.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"
TRAINER_FILE = "trainer_state.json"
"""Transformers' own state of a trainer and its callbacks, in every checkpoint."""


def save_state(path: Path, state: dict[str, Tensor]) -> None:
    """Write ``state``; an empty one writes no file."""
    if state:
        save_file({key: value.detach().cpu().contiguous() for key, value in state.items()}, path)


def load_state(path: Path) -> dict[str, Tensor]:
    """Read what :func:`save_state` wrote; raise CheckpointError if the file is damaged."""
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); delete this checkpoint") from None


def to_text(state: dict[str, Tensor]) -> str:
    """``state`` as ASCII, bit for bit, for a file that can store only text."""
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    return base64.b64encode(save(tensors)).decode("ascii")


def from_text(text: str, where: str) -> dict[str, Tensor]:
    """Read what :func:`to_text` returned; raise CheckpointError naming ``where`` if damaged."""
    try:
        return load(base64.b64decode(text, validate=True))
    except (binascii.Error, SafetensorError, ValueError, TypeError) as problem:
        raise CheckpointError(f"{where}: cannot be read ({problem})") from None


def to_bytes(packed: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a file with what :func:`pack` returned, and its tensors."""
    return save(_storable(tensors), metadata={"state": json.dumps(packed)})


def write_packed(path: Path, packed: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write a file with what :func:`pack` returned, and its tensors."""
    save_file(_storable(tensors), path, metadata={"state": json.dumps(packed)})


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` on the CPU, without shared memory, as the format requires."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        # 8-bit optimizers share one table among all parameters.
        stored[name] = value.clone() if address in seen else value
        seen.add(address)
    return stored


def read_packed(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Packed state and tensors of such a file; raise CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return json.loads((file.metadata() or {}).get("state", "{}")), tensors
    except (OSError, SafetensorError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem})") from None


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return ``value`` as JSON; its tensors go into ``tensors``, by names that start with ``path``.

    Raises:
        CheckpointError: a value is neither plain nor a tensor.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        items = {k: pack(item, tensors, f"{path}/{k}".lstrip("/")) for k, item in value.items()}
        if all(isinstance(key, str) for key in items):
            return items
        return {_ITEMS: [[key, item] for key, item in items.items()]}
    if isinstance(value, list | tuple):
        parts = [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    raise CheckpointError(
        f"{path}: a {type(value).__name__} cannot be saved without pickle; use an optimizer and "
        "scheduler whose state is numbers and tensors"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that :func:`pack` was called with."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(unpack(item, tensors) for item in value[_TUPLE])
    if _ITEMS in value:
        return {key: unpack(item, tensors) for key, item in value[_ITEMS]}
    return {key: unpack(item, tensors) for key, item in value.items()}
