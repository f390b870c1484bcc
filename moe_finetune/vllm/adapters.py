"""Check LoRA adapters that vLLM serves unmerged, and rewrite them for its loader."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import AdapterError, RecipeError
from moe_finetune.vllm.lora_support import LORA_RANKS, LoraSupport

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapter import Adapter
    from moe_finetune.checkpoint.open import Checkpoint


def named_adapters(arguments: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Parse ``NAME=FOLDER``, or a folder that gives the name, to names and folders.

    Raises:
        RecipeError: a name is empty or given twice.
    """
    pairs: dict[str, Path] = {}
    for text in arguments:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else text)
        name = name if equals else path.resolve().name
        if not name or not str(path).strip("."):
            raise RecipeError(f"--adapter {text}: expected NAME=FOLDER or a folder")
        if name in pairs:
            raise RecipeError(
                f"--adapter {text}: another adapter has the name '{name}'; write NAME=FOLDER"
            )
        pairs[name] = path
    return tuple(pairs.items())


def checked_adapters(
    base: Checkpoint, adapters: Sequence[tuple[str, Path]], cpu: bool, scratch: Path
) -> list[tuple[str, Adapter]]:
    """The adapters in the form that vLLM reads, unchanged or rewritten below ``scratch``.

    Raises:
        AdapterError: an adapter is damaged, belongs to another base, or cannot be served unmerged;
            names the reason.
    """
    from moe_finetune.checkpoint.adapter import open_adapter
    from moe_finetune.checkpoint.updates import check_adapter

    readable: list[tuple[str, Adapter]] = []
    for index, (name, path) in enumerate(adapters):
        opened = check_adapter(path, base)
        if cpu:
            raise _unmerged(path, "vLLM serves LoRA on MoE models on GPUs only")
        readable.append((name, open_adapter(as_vllm(opened, base, scratch / f"{index}"))))
    return readable


def as_vllm(adapter: Adapter, base: Checkpoint, output: Path) -> Path:
    """``adapter``'s own folder if vLLM reads it; else ``output`` with a rewritten one.

    Raises:
        AdapterError: vLLM cannot serve the adapter unmerged; names the reason.
    """
    from moe_finetune.checkpoint.adapter import BIAS_FILE, open_adapter
    from moe_finetune.checkpoint.packings import as_peft

    folder = adapter.folder
    absorbed = next((key for key in adapter.tensors if ".kv_b_proj." in key), None)
    if (folder / BIAS_FILE).is_file():
        raise _unmerged(folder, "it has a routing bias, which an adapter cannot carry into vLLM")
    if absorbed is not None:
        raise _unmerged(folder, f"vLLM folds '{absorbed}' into other weights on loading")
    written = open_adapter(as_peft(adapter, base, output.with_name(f"{output.name}-peft")))
    stack = base.family.experts_name
    pair = [
        any(key.endswith(f".{stack}{inner}.lora_A.weight") for key in written.tensors)
        for inner in ("", ".base_layer")
    ]
    if pair[0] != pair[1]:
        raise _unmerged(folder, "it adapts only one of the experts' two parameters")
    return _patterns_by_module(written, output).folder


def convert_for_vllm(adapter: Adapter, base: Checkpoint, output: Path) -> Path:
    """:func:`as_vllm`, for a server that gets no other check: also refuse what its reader would."""
    whole = next((key for key in adapter.tensors if ".lora_" not in key), None)
    if whole is not None:
        raise _unmerged(adapter.folder, f"'{whole}' trained in full")
    if adapter.config.get("use_dora"):
        raise _unmerged(adapter.folder, "vLLM has no DoRA")
    return as_vllm(adapter, base, output)


def _unmerged(adapter: Path, reason: str) -> AdapterError:
    return AdapterError(
        f"{adapter}: vLLM 0.32 cannot serve this adapter without merging: {reason}; merge it with "
        "'moe-finetune merge' and serve the merged checkpoint"
    )


def _patterns_by_module(adapter: Adapter, output: Path) -> Adapter:
    """The adapter with patterns that name modules, because vLLM does not match parameters."""
    from moe_finetune.checkpoint.adapter import CONFIG, WEIGHTS, open_adapter

    patterns = {
        key: {
            re.sub(r"\\?\.weight$", "", name): value
            for name, value in (adapter.config.get(key) or {}).items()
        }
        for key in ("rank_pattern", "alpha_pattern")
    }
    if all(patterns[key] == (adapter.config.get(key) or {}) for key in patterns):
        return adapter
    output.mkdir(parents=True)
    (output / CONFIG).write_text(json.dumps(adapter.config | patterns), encoding="utf-8")
    (output / WEIGHTS).symlink_to((adapter.folder / WEIGHTS).resolve())
    return open_adapter(output)


def adapter_arguments(
    base: Checkpoint, adapters: Sequence[tuple[str, Adapter]], support: LoraSupport
) -> dict[str, list[str]]:
    """Options that serve ``adapters`` in addition to ``base``.

    Args:
        support: vLLM's support for the base's class and for each adapter.

    Raises:
        AdapterError: vLLM does not support an adapter; the message gives vLLM's reason.
    """
    family = base.family
    rank, modules, any_stacks = 1, [], False
    for (name, adapter), refused in zip(adapters, support.refused, strict=True):
        stacks = any(f".{family.experts_name}." in key for key in adapter.tensors)
        if not support.supported:
            raise _unmerged(adapter.folder, f"vLLM's class of {family.title} has no LoRA")
        if refused is not None:
            raise _unmerged(adapter.folder, refused)
        if stacks and not support.gated:
            raise _unmerged(adapter.folder, f"vLLM cannot read stacked experts of {family.title}")
        ranks = [adapter.config["r"], *(adapter.config.get("rank_pattern") or {}).values()]
        rank, any_stacks = max(rank, *ranks), any_stacks or stacks
        module = {"name": name, "path": str(adapter.folder.resolve())}
        modules.append(json.dumps({**module, "is_3d_lora_weight": True} if stacks else module))
    arguments = {
        "--enable-lora": [],
        "--max-loras": [str(len(adapters))],
        "--max-lora-rank": [
            str(next(supported_rank for supported_rank in LORA_RANKS if supported_rank >= rank))
        ],
        "--lora-modules": modules,
    }
    if any_stacks and not support.stacked:
        arguments["--enable-mixed-moe-lora-format"] = []
    return arguments
