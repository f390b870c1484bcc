"""What published checkpoints contain: a fixture each, read from public files.

A fixture is a JSON file: the published ``config.json`` whole, and a row for each kind of tensor in
the published files. A row's ``names`` have braces as a shell reads them, ``{0..59}``, ``{gate,up}``
and ``{00001..00012}``, also ``{3..47:4}`` with a step and ``{0,4..6}``. Its ``part`` is what the
tensors belong to, ``other`` where it is left out.
"""

import copy
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_finetune.io.safetensors_header import ITEM_BYTES

FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))

ADAPTED = ("attention", "router", "shared experts", "routed experts")
MODEL_PARTS = (*ADAPTED, "other")
"""Parts of the language model, as ``inspect`` counts them."""
BESIDE = ("scale", "buffer", "mtp", "vision")
"""Scales of quantized tensors, tensors that are no parameters, and parts that do not train."""
_PACKED = {"U8": 2, "I32": 8}
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Row:
    """Tensors of one shape and dtype."""

    names: str
    shape: tuple[int, ...]
    dtype: str
    part: str = "other"
    values: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.part in (*MODEL_PARTS, *BESIDE), self
        assert self.dtype in ITEM_BYTES, self

    @cached_property
    def expanded(self) -> list[str]:
        return list(expand(self.names))

    @property
    def adapted(self) -> bool:
        """Whether a LoRA on everything changes it: the matrices of four parts, not their biases and
        not a shared expert's gate, which has a key of its own."""
        matrix = len(self.shape) > 1 and not self.names.endswith(
            ("bias", "shared_expert_gate.weight")
        )
        return matrix and self.part in ADAPTED

    @property
    def bytes(self) -> int:
        return len(self.expanded) * math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Numbers that the tensors stand for; none of a scale."""
        if self.part in ("scale", "buffer"):
            return 0
        return len(self.expanded) * math.prod(self.shape) * _PACKED.get(self.dtype, 1)


@dataclass(frozen=True)
class Published:
    """One published checkpoint.

    Attributes:
        model: its name on the hub.
        read_at: where the config, the names and the sizes were read.
        deduced: what was not read, and from what it follows.
        stated: what the sources count: ``tensors``, ``elements`` (numbers stored, scales too),
            ``bytes``, ``gib`` (rounded to hundredths), ``parameters`` of the language model, and
            ``billions`` (those rounded).
        files: names of the weight files, as a pattern.
        refused: what ``inspect`` or ``merge`` still answers, by verb: a part of the message.
    """

    name: str
    model: str
    read_at: list[str]
    config: dict[str, Any]
    rows: list[Row]
    stated: dict[str, float]
    files: str = "model.safetensors"
    deduced: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def counted(self) -> dict[str, float]:
        """What ``stated`` may have, of the rows."""
        tensors = sum(len(row.expanded) for row in self.rows)
        elements = sum(len(row.expanded) * math.prod(row.shape) for row in self.rows)
        parameters = self.count(*MODEL_PARTS)
        return {
            "tensors": tensors,
            "elements": elements,
            "bytes": self.bytes,
            "gib": round(self.bytes / 2**30, 2),
            "parameters": parameters,
            "billions": round(parameters / 1e9),
        }

    @property
    def tensors(self) -> Iterator[tuple[str, Row]]:
        return ((name, row) for row in self.rows for name in row.expanded)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def count(self, *parts: str) -> int:
        """Parameters of ``parts``."""
        return sum(row.parameters for row in self.rows if row.part in parts)


def read(name: str) -> Published:
    """The fixture ``name``."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rows = [
        Row(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
        for row in content.pop("tensors")
    ]
    return Published(name=name, rows=rows, **content)


def shortened(published: Published) -> Published:
    """Its first five layers and its last, where all layers after the first dense ones are alike."""
    config = copy.deepcopy(published.config)
    text = config.get("text_config", config)
    layers, kept = text["num_hidden_layers"], 6
    by_number = [isinstance(value, list) and len(value) == layers for value in text.values()]
    if any(by_number) or any(text.get(key, 1) != 1 for key in _KINDS):
        return published
    text["num_hidden_layers"] = kept
    if "moe_layer_end_index" in text:
        text["moe_layer_end_index"] = kept - 1
    rows = []
    for row in published.rows:
        numbers = {name: re.search(r"\blayers\.(\d+)\.", name) for name in row.expanded}
        for name, found in numbers.items():
            number = -1 if found is None or row.part == "vision" else int(found[1])
            if number < kept - 1:
                rows.append(replace(row, names=name))
            elif found is not None and number >= layers - 1:  # the last, and MTP's behind it
                start, end = found.span(1)
                renamed = f"{name[:start]}{number - layers + kept}{name[end:]}"
                rows.append(replace(row, names=renamed))
    return replace(published, config=config, rows=rows)


_KINDS = (
    *("full_attention_interval", "attn_layer_period", "linear_attn_config"),
    *("hybrid_override_pattern", "moe_layer_interval", "decoder_sparse_step"),
)
"""Keys by which a layer's number decides what it is."""


def expand(pattern: str) -> Iterator[str]:
    """Every name of ``pattern``, the last brace changing fastest."""
    pieces = _BRACES.split(pattern)
    choices = [list(_choices(piece)) for piece in pieces[1::2]]
    for chosen in itertools.product(*choices):
        parts = [*itertools.chain.from_iterable(zip(pieces[::2], chosen, strict=False)), pieces[-1]]
        yield "".join(parts)


def _choices(brace: str) -> Iterator[str]:
    for choice in brace.split(","):
        first, dots, last = choice.partition("..")
        if not dots:
            yield choice
            continue
        last, _, step = last.partition(":")
        for number in range(int(first), int(last) + 1, int(step or 1)):
            yield str(number).zfill(len(first))
