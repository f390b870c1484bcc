"""``convert --to vllm``: LoRA adapters in the form in which vLLM serves them unmerged."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import AdapterError

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapter_files import Adapter
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.checkpoint.updates import OpenAdapter
    from moe_finetune.io.safetensors_header import TensorInfo

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""


def convert_for_vllm(adapter: OpenAdapter) -> tuple[dict[str, Any], Mapping[str, TensorInfo]]:
    """Config and tensors of ``adapter`` as vLLM reads them."""
    from moe_finetune.checkpoint.adapter_files import BIAS_FILE
    from moe_finetune.checkpoint.peft_form import peft_form

    folder = adapter.folder
    absorbed = next((key for key in adapter.tensors if ".kv_b_proj." in key), None)
    whole = next((key for key in adapter.tensors if ".lora_" not in key), None)
    if (folder / BIAS_FILE).is_file():
        raise _unmerged(folder, "it has a routing bias, which an adapter cannot carry into vLLM")
    if absorbed is not None:
        raise _unmerged(folder, f"vLLM folds '{absorbed}' into other weights on loading")
    if whole is not None:
        raise _unmerged(folder, f"'{whole}' trained in full")
    if adapter.config.get("use_dora"):
        raise _unmerged(folder, "vLLM has no DoRA")
    form, stack = peft_form(adapter), adapter.base.places.experts_name
    pair = [
        any(key.endswith(f".{stack}{inner}.lora_A.weight") for key in form.tensors)
        for inner in ("", ".base_layer")
    ]
    if pair[0] != pair[1]:
        raise _unmerged(folder, "it adapts only one of the experts' two parameters")
    patterns = {  # vLLM does not match parameters
        key: {
            re.sub(r"\\?\.weight$", "", name): value
            for name, value in (form.config.get(key) or {}).items()
        }
        for key in ("rank_pattern", "alpha_pattern")
    }
    return form.config | patterns, form.tensors


def _unmerged(adapter: Path, reason: str) -> AdapterError:
    return AdapterError(
        f"{adapter}: vLLM cannot serve this adapter without merging: {reason}; merge it with "
        "'moe-finetune merge' and serve the merged checkpoint"
    )


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
