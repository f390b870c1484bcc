"""``moe_finetune.json`` in an adapter's folder: what PEFT's own config has no field for.

``{"chosen_experts": {"<layer>": [ids]}, "experts_dropout": p}``. ``chosen_experts`` is present when
only chosen experts trained (expert-selective fine-tuning, ESFT); the others' factors are zero, and
the adapter is an ordinary PEFT adapter.

Checkpoints of such a training, and adapters written until November 2026, have ``experts`` in place
of ``chosen_experts``. A layer's factors are then packed like PEFT's for a whole stack, for the n
listed experts in the listed order: ``lora_A`` (n·r, in) with the expert slowest, ``lora_B`` (out,
r·n) with the expert fastest. A layer that is not listed has no expert LoRA.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.errors import AdapterError
from moe_finetune.io.checkpoint_files import COPY_AGAIN
from moe_finetune.io.json_file import read_object

METADATA = "moe_finetune.json"


@dataclass(frozen=True)
class AdapterMetadata:
    """Contents of ``moe_finetune.json``.

    Attributes:
        experts: decoder layer -> experts with factors, in packing order; None if all have them.
        experts_dropout: LoRA dropout on the routed experts, which PEFT's config cannot hold.
        extra: every other key of the file, unchanged.
    """

    experts: dict[int, tuple[int, ...]] | None = None
    experts_dropout: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_metadata(
    folder: str | Path,
    experts: Mapping[int, Sequence[int]] | None = None,
    experts_dropout: float = 0.0,
    **extra: Any,
) -> Path:
    """Write ``moe_finetune.json`` into an adapter folder and return its path."""
    content: dict[str, Any] = {"experts_dropout": experts_dropout, **extra}
    if experts is not None:
        content["experts"] = {str(k): [int(e) for e in experts[k]] for k in sorted(experts)}
    file = Path(folder) / METADATA
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file


def read_metadata(folder: str | Path) -> AdapterMetadata:
    """Read ``moe_finetune.json``; an adapter without the file gets the defaults.

    Raises:
        AdapterError: the file does not have the format that the module's docstring describes.
    """
    file = Path(folder) / METADATA
    if not file.is_file():
        return AdapterMetadata()
    content = read_object(file, AdapterError, COPY_AGAIN)
    experts = content.pop("experts", None)
    dropout = content.pop("experts_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise AdapterError(
            f"{file}: experts_dropout is {dropout!r:.60}; it must be a number from 0 to below 1"
        )
    return AdapterMetadata(_experts(file, experts), float(dropout), content)


def _experts(file: Path, value: Any) -> dict[int, tuple[int, ...]] | None:
    if value is None:
        return None
    wrong = AdapterError(
        f"{file}: 'experts' must map a layer's number to a list of different expert numbers"
    )
    if not isinstance(value, dict):
        raise wrong
    chosen: dict[int, tuple[int, ...]] = {}
    for layer, ids in value.items():
        valid = isinstance(ids, list) and all(type(e) is int and e >= 0 for e in ids)
        is_layer = layer.isascii() and layer.isdigit() and str(int(layer[:9])) == layer
        if not is_layer or not valid or not ids or len(set(ids)) != len(ids):
            raise wrong
        chosen[int(layer)] = tuple(ids)
    return chosen
