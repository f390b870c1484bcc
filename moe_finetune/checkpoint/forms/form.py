"""What a form of an adapter is: one file with its names and packing, registered in one line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_finetune.checkpoint.updates import OpenAdapter
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.registry import Registry

Written = tuple[dict[str, Any], Mapping[str, TensorInfo]]
"""The config, and the tensors by key without PEFT's prefix."""


@dataclass(frozen=True)
class Form:
    """A form in which adapters are written.

    Attributes:
        readers: programs that read it.
        loses: what an adapter loses in it, in a clause.
        write: the adapter in this form; raises AdapterError with the reason where it has none.
    """

    readers: str
    loses: str
    write: Callable[[OpenAdapter], Written]


FORMS: Registry[Form] = Registry("form of an adapter", AdapterError)
"""By the names of ``convert --to``."""
