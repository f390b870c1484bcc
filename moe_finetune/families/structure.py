"""What transformers' own class says about a config: asked from the model on the meta device."""

from __future__ import annotations

import functools
import re
from typing import Any

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")


def layers_with_experts(config: Any) -> list[int]:
    """Decoder layers of ``config`` that hold routed experts, in order; takes no memory."""
    return list(_layers_with_experts(type(config), config.to_json_string(use_diff=False)))


@functools.lru_cache(maxsize=64)
def _layers_with_experts(kind: type, text: str) -> tuple[int, ...]:
    import json

    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(kind(**json.loads(text)))
    found = {
        int(match[1])
        for name, module in model.named_modules()
        if (match := _EXPERTS.search(name)) and hasattr(module, "has_gate")
    }
    return tuple(sorted(found))
