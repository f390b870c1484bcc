"""How vLLM serves an adapter that ``convert --to vllm`` wrote."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapters.files import Adapter
    from moe_finetune.checkpoint.open import Checkpoint

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""


def serve_line(base: Checkpoint, adapter: Adapter, name: str) -> str:
    """The command with which vLLM serves ``adapter``, as ``convert --to vllm`` wrote it."""
    ranks = [adapter.config["r"], *(adapter.config.get("rank_pattern") or {}).values()]
    stacks = any(f".{base.places.experts_name}." in key for key in adapter.tensors)
    module: dict[str, object] = {"name": name, "path": str(adapter.folder.resolve())}
    words = ["vllm", "serve", str(base.folder), "--enable-lora", "--max-lora-rank"]
    words.append(str(next(rank for rank in LORA_RANKS if rank >= max(ranks))))
    if stacks:
        words.append("--enable-mixed-moe-lora-format")
        module["is_3d_lora_weight"] = True
    return shlex.join([*words, "--lora-modules", json.dumps(module)])
