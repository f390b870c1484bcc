"""How programs name the factors of routed experts, and which kinds of names a file has."""

import re
from dataclasses import dataclass
from typing import Literal

from moe_finetune.checkpoint.adapters.files import Adapter

Kind = Literal["peft", "per-expert", "listed", "stacked", "grouped"]
"""PEFT's packed stacks; a matrix of one expert, by expert or in Unsloth's lists by projection; a
projection of all experts; Automodel's own.
"""
Role = Literal["gate", "up", "down", "gate and up"]

ROLES: dict[str, Role] = {
    "w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up",
    "w2": "down", "down_proj": "down", "down": "down",
    "gate_up_proj": "gate and up", "gate_and_up": "gate and up",
}  # fmt: skip
WITHOUT_GATE: dict[str, Role] = {
    "w1": "up", "up_proj": "up", "gate_and_up": "up", "w2": "down", "down_proj": "down",
    "down": "down",
}  # fmt: skip
"""The same for experts without a gate: Tinker's w1 is then the up projection."""

_IN_EXPERTS = re.compile(r"(.*\.layers\.(\d+)\.(?:[^.]+\.)*?experts)\.(?:(\d+)\.)?(.+)")
_PEFT = re.compile(r"(?:base_layer\.)?lora_[AB]\.weight")
_PROJECTION = re.compile(r"(w[123]|gate_proj|up_proj|down_proj|gate_up_proj)\.lora_([AB])\.weight")
_LISTED = re.compile(r"(gate_up_proj|down_proj)s\.(\d+)\.lora_([AB])\.weight")
_GROUPED = re.compile(r"lora_(gate_and_up|down)_([AB])")


@dataclass(frozen=True)
class ExpertKey:
    """A key of a factor of routed experts.

    ``stack``: path of the experts' module; ``expert``: None for a tensor of all of them.
    """

    key: str
    kind: Kind
    stack: str
    layer: int
    expert: int | None = None
    projection: str = ""
    side: str = ""

    @property
    def partner(self) -> str:
        """The key of the other factor."""
        other = {"A": "B", "B": "A"}[self.side]
        head, _, tail = self.key.rpartition(f"lora_{self.side}")
        if self.kind == "grouped":
            return f"{self.key[:-1]}{other}"
        return f"{head}lora_{other}{tail}"


def expert_keys(adapter: Adapter) -> list[ExpertKey]:
    """The keys of factors of routed experts, whichever program named them."""
    keys = []
    for key in adapter.tensors:
        if (inside := _IN_EXPERTS.fullmatch(key)) is None:
            continue
        stack, layer, index, tail = inside.groups()
        expert = None if index is None else int(index)
        if expert is None and _PEFT.fullmatch(tail):
            keys.append(ExpertKey(key, "peft", stack, int(layer)))
        elif named := _PROJECTION.fullmatch(tail):
            kind: Kind = "stacked" if expert is None else "per-expert"
            keys.append(ExpertKey(key, kind, stack, int(layer), expert, *named.groups()))
        elif expert is None and (named := _LISTED.fullmatch(tail)):
            projection, index, side = named.groups()
            keys.append(ExpertKey(key, "listed", stack, int(layer), int(index), projection, side))
        elif expert is None and (named := _GROUPED.fullmatch(tail)):
            keys.append(ExpertKey(key, "grouped", stack, int(layer), None, *named.groups()))
    return keys
