"""Names in the files of a family's tiny model, as transformers writes them."""

import functools

from moe_finetune.models.class_structure import patterns_on_disk
from tests.support.places import config, places

EXPERTS = ("gate", "up", "down")


@functools.cache
def patterns(family: str) -> dict[str, str]:
    """Part -> its name with ``{layer}`` and ``{expert}``; a fused stack is ``gate_up``."""
    facts, plain = places(family), config(family).to_dict()
    layer = f"{facts.backbone}.layers.{facts.moe_layers[-1]}"
    loaded, down = facts.expert_parameters

    def stored(path: str) -> list[str]:
        return patterns_on_disk(plain, f"{layer}.{path}")

    first = stored(f"{facts.experts_path}.{loaded}")
    kinds = ("gate", "up") if len(first) == 2 else ("gate_up",) if facts.gated else ("up",)
    return {
        "router": stored(facts.router_target)[0],
        **dict(zip(kinds, first, strict=True)),
        "down": stored(f"{facts.experts_path}.{down}")[0],
    }


def name(family: str, part: str, layer: int, expert: int | None = None) -> str:
    """The name of one layer's router, or of one expert's matrix."""
    return patterns(family)[part].format(layer=layer, expert=expert)


def stack(family: str) -> str:
    """What stands before a decoder layer's number."""
    return patterns(family)["router"].partition("{layer}")[0]
