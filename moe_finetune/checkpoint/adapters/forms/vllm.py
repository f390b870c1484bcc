"""What vLLM serves unmerged: PEFT's stacks, with patterns by module."""

import re
from pathlib import Path

from moe_finetune.checkpoint.adapters.files import BIAS_FILE
from moe_finetune.checkpoint.adapters.forms.form import Form, Written
from moe_finetune.checkpoint.adapters.in_peft import peft_form
from moe_finetune.checkpoint.adapters.updates import OpenAdapter
from moe_finetune.errors import AdapterError


def write(adapter: OpenAdapter) -> Written:
    """Config and tensors of ``adapter`` as vLLM reads them."""
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


FORM = Form(
    programs="vLLM, with --enable-mixed-moe-lora-format",
    loses="nothing; a router or gate that trained in full is refused",
    write=write,
)
