"""An adapter over a model in PEFT: every tensor goes where its name says, and none may be missing.

``PeftModel.from_pretrained`` is not used: PEFT 0.21 applies the renamings of transformers 4 to keys
that are already right, loses factors that way (shared experts of Laguna and DeepSeek-OCR-2), and
only warns.
"""

import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_finetune.checkpoint.adapter import CONFIG, Adapter, open_adapter
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.peft_form import peft_folder
from moe_finetune.checkpoint.tensors import read_tensor
from moe_finetune.errors import AdapterError, reason_of
from moe_finetune.io.safetensors_header import TensorInfo

# A router's buffer is saved only where the router trains.
_MAY_LACK = "e_score_correction_bias"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def with_adapter(model: Any, adapter: Adapter, base: Checkpoint, layers: int | None = None) -> Any:
    """``model`` with ``adapter``, of any program, in PEFT and in eval mode.

    Args:
        base: the checkpoint of ``model``.
        layers: number of layers of a ``model`` that has only the first; None if it has all.

    Raises:
        AdapterError: PEFT cannot apply the adapter, or one of its tensors has no place in the model
            or the other way round.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = peft_folder(adapter, base, Path(scratch) / "adapter")
        written = adapter if folder == adapter.folder else open_adapter(folder)
        wrapped = wrap(model, written)
        fill(wrapped, written, layers)
    return wrapped.eval()


def wrap(model: Any, adapter: Adapter) -> Any:
    """``model`` with PEFT's modules for the adapter's config, with initial values."""
    from peft import LoraConfig, PeftModel, PeftModelForCausalLM

    from moe_finetune.moe.lora_factors import quiet_patterns

    config = LoraConfig.from_pretrained(str(adapter.folder))
    config.inference_mode = True
    kind = PeftModelForCausalLM if config.task_type == "CAUSAL_LM" else PeftModel
    try:
        with warnings.catch_warnings(), quiet_patterns():
            warnings.simplefilter("ignore")
            return kind(model, config)
    except Exception as error:  # PEFT's checks raise half a dozen types
        raise AdapterError(
            f"{adapter.folder / CONFIG}: PEFT cannot apply it: {reason_of(error):.300}"
        ) from error


@torch.no_grad()
def fill(wrapped: Any, adapter: Adapter, layers: int | None = None) -> None:
    """Copy the adapter's tensors into PEFT's modules."""
    from peft import get_peft_model_state_dict

    stored: Mapping[str, TensorInfo] = adapter.tensors
    if layers is not None:
        numbers = {key: _LAYER.search(key) for key in stored}
        stored = {
            k: stored[k] for k, match in numbers.items() if not match or int(match[1]) < layers
        }
    prefix = "base_model.model."
    live = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    targets = {key.removeprefix(prefix): tensor for key, tensor in live.items()}
    others = dict(wrapped.named_parameters())
    missing = sorted(k for k in targets.keys() - stored.keys() if not k.endswith(_MAY_LACK))
    missing = [key for key in missing if key not in adapter.tables]
    if missing:
        raise AdapterError(
            f"{adapter.folder}: adapter tensor '{missing[0]}' is missing ({len(missing)} in all)"
        )
    for key, info in stored.items():
        target = targets.get(key)
        if target is None:  # a whole embedding that was saved beside its factors
            target = others.get(prefix + key)
        if target is None or tuple(target.shape) != info.shape:
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' {list(info.shape)} has no place in PEFT"
            )
        target.copy_(read_tensor(info))
