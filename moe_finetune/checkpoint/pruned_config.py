"""The config of a checkpoint with fewer experts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.errors import CheckpointError
from moe_finetune.io.check_config import QUANTIZATION

_MTP_COUNTS = re.compile(r"num_.*(nextn|mtp)|mtp_num")
_EXPERTS_OF_PATTERN = re.compile(r"experts\W*\d")


def config_changes(base: Checkpoint, count: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Changes of ``config.json`` for ``count`` experts, those of its language part's section, and
    transformers' config with them.
    """
    section = base.config.get("text_config")
    text: dict[str, Any] = section if isinstance(section, dict) else base.config
    total = base.places.num_experts
    shown = text | base.model_config.get_text_config().to_dict()
    keys = [key for key, value in shown.items() if _counts(key, value, total)]
    named = [key for key in keys if key in text] or keys
    changed: dict[str, Any] = {}
    config = copy.deepcopy(base.model_config)
    for key in named:
        value = shown[key]
        changed[key] = [count] * len(value) if isinstance(value, list) else count
        setattr(config.get_text_config(), key, changed[key])
    if base.family.places(config).num_experts != count:
        raise CheckpointError(
            f"{base.folder / 'config.json'}: no key was found that sets the number of experts, "
            f"{total}; save the checkpoint again with transformers"
        )
    for key, value in text.items():
        if _MTP_COUNTS.match(key) and type(value) is int and value:
            changed[key] = 0
            setattr(config.get_text_config(), key, 0)
    if text is base.config:
        return changed, changed, config
    # Some files repeat the number next to the section, where other loaders read it.
    repeated = {key: count for key, value in base.config.items() if _counts(key, value, total)}
    return {"text_config": text | changed, **repeated}, changed, config


def _counts(key: str, value: Any, total: int) -> bool:
    """Whether a key of a config is the number of routed experts, or a list of it a layer."""
    if "expert" not in key or any(word in key for word in ("shared", "per_tok", "layer")):
        return False  # Jamba's expert_layer_period may be the same number
    values = value if isinstance(value, list) and value else [value]
    return all(type(count) is int and count == total for count in values)


def quantization_changes(
    base: Checkpoint, renamed: Mapping[str, str], dropped: set[str]
) -> dict[str, Any]:
    """``quantization_config`` with the new numbers of the experts that it names."""
    if base.quantized is None:
        return {}
    config = json.loads((base.folder / "config.json").read_bytes())
    modules = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in renamed.items()}
    gone = {name.rpartition(".")[0] for name in dropped} - modules.keys()

    def renumbered(value: Any) -> Any:
        if isinstance(value, dict):
            return {renumbered(key): renumbered(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [renumbered(entry) for entry in value if not gone.issuperset([str(entry)])]
        if not isinstance(value, str) or value in modules:
            return modules.get(value, value)
        if _EXPERTS_OF_PATTERN.search(value):
            raise CheckpointError(
                f"{base.folder / 'config.json'}: {QUANTIZATION} has '{value:.60}', whose experts "
                "have other numbers after pruning; prune the unquantized checkpoint"
            )
        return value

    section = renumbered(config[QUANTIZATION])
    return {} if section == config[QUANTIZATION] else {QUANTIZATION: section}
