"""An adapter's config: the keys that are read, those that change nothing, and those refused.

A later PEFT, or another program, may add keys that change what the factors compute; a key that is
in no list is refused unless its value is neutral or the default of the PEFT that is installed.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from moe_finetune.errors import AdapterError
from moe_finetune.io.checkpoint_files import COPY_AGAIN
from moe_finetune.io.json_file import read_object

_Names = list[str] | str | None
_Rank = Annotated[int, Field(strict=True, gt=0)]
_Alpha = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class _Config(BaseModel):
    """What PEFT's own config takes without a check."""

    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    target_modules: _Names = None
    exclude_modules: _Names = None
    target_parameters: _Names = None
    modules_to_save: _Names = None


_READ = frozenset(_Config.model_fields) | {
    "bias", "ensure_weight_tying", "fan_in_fan_out", "gate_up_rows", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_B_layout", "peft_type", "peft_version",
    "unsloth_fused_expert_lora", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys by which the factors are read, here, in the forms, or by PEFT's own classes."""
_WITHOUT_EFFECT = frozenset({
    # Notes, and what only training reads.
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "revision",
    "runtime_config", "task_type",
    # Of ms-swift: the precision and the learning rates of training.
    "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio",
    # How the factors began; init_lora_weights says whether the base's weights changed, too.
    "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    # Sizes and names for use_qalora and megatron_config.
    "megatron_core", "qalora_group_size",
})  # fmt: skip
_REFUSED = (
    "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "megatron_config",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
"""Options that change what the factors mean; a merge that ignored them would be silently wrong."""
_KEEP_BASE = ("gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights`` that leave the base's weights as they are."""


def no_merge_because(config: Mapping[str, Any]) -> str | None:
    """Why an adapter with this PEFT config cannot be merged, and what to do; None if it can."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return f"peft_type is {getattr(kind, 'value', kind)}; only LoRA adapters can be merged"
    for key in _REFUSED:
        if config.get(key):
            return f"'{key}' is set; moe-finetune cannot merge such an adapter; merge it with PEFT"
    start = config.get("init_lora_weights", True)
    if start not in (True, False, None, *_KEEP_BASE):
        return (
            f"init_lora_weights is {start!r:.60}, which changes the base's weights too; convert "
            "the adapter to an ordinary one with PEFT"
        )
    unknown = config.keys() - _READ - _WITHOUT_EFFECT - set(_REFUSED)
    active = {key: config[key] for key in sorted(unknown) if not _is_neutral(config[key])}
    return _unknown_because(active, config.get("peft_version")) if active else None


def _is_neutral(value: Any) -> bool:
    """Whether an option with this value is off in every program."""
    return value is None or value is False or value in ("", [], {})


def _unknown_because(options: Mapping[str, Any], made_by: Any) -> str | None:
    """Why one of ``options`` forbids a merge; None if all have the defaults of PEFT."""
    from peft import LoraConfig  # takes seconds, and few adapters have such a key

    defaults = LoraConfig().to_dict()
    for key, value in options.items():
        if key not in defaults:
            program = f"PEFT {made_by}" if made_by else "the program"
            return (
                f"'{key}' is {value!r:.60}, and neither moe-finetune nor the installed PEFT "
                f"{version('peft')} knows that key. Install {program} that made the adapter; or, "
                "if the key does not change what the factors compute, remove it from the file"
            )
        if value != defaults[key]:
            return (
                f"'{key}' is {value!r:.60}, which moe-finetune does not read; PEFT's default is "
                f"{defaults[key]!r:.60}. Merge the adapter with PEFT"
            )
    return None


def read_config(file: Path) -> dict[str, Any]:
    """The config in ``file``, checked."""
    config = read_object(file, AdapterError, COPY_AGAIN)
    if "r" in config or "lora_alpha" in config:  # Tinker's own config does not say what it is
        config.setdefault("peft_type", "LORA")
    if (reason := no_merge_because(config)) is not None:
        raise AdapterError(f"{file}: {reason}")
    try:
        _Config.model_validate(config)
        for pattern in (*(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())):
            re.compile(pattern)
    except ValidationError as error:
        wrong = error.errors()[0]
        option = str(wrong["loc"][0])
        if wrong["type"] == "missing":
            raise AdapterError(
                f"{file}: '{option}' is missing; add the value with which the adapter was trained "
                "(r is the rank, the smaller size of a lora_A)"
            ) from None
        if option.endswith("_pattern") and len(wrong["loc"]) > 1:
            option = f"{option}' of '{wrong['loc'][1]}"
        raise AdapterError(f"{file}: '{option}': {wrong['msg']}") from None
    except re.error as error:
        raise AdapterError(
            f"{file}: rank_pattern and alpha_pattern must map regular expressions to numbers "
            f"({error})"
        ) from None
    return config
