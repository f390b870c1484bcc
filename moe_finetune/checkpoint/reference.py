"""Compare a merged checkpoint's logits with base + adapters in stock transformers and PEFT."""

import copy
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.peft_form import peft_folder
from moe_finetune.models.base import CORRECTION_BIASES
from moe_finetune.models.structure import class_of


def compare_logits(
    base: Checkpoint,
    adapters: list[tuple[Adapter, float]],
    merged: Checkpoint,
    ids: list[Tensor],
    bias: Mapping[int, Sequence[float]] | None = None,
) -> tuple[float, float]:
    """Return the largest absolute difference, and the difference's norm over the logits' norm.

    If all logits are 0, the second is 0 if the merged ones are too, and otherwise infinite.
    """
    with tempfile.TemporaryDirectory() as scratch:
        model = apply_adapters(load(base), base, adapters, Path(scratch))
        expected = logits_of(model, ids, base, bias)
        del model
    merged_logits = logits_of(load(merged), ids)
    differences = [a - b for a, b in zip(merged_logits, expected, strict=True)]
    max_abs = max(difference.abs().max().item() for difference in differences)
    norm, error = (
        sum(difference.square().sum().item() for difference in group) ** 0.5
        for group in (expected, differences)
    )
    return max_abs, error / norm if norm else math.inf if error else 0.0


def load(checkpoint: Checkpoint) -> Any:
    """Load the checkpoint in transformers, in float32 and eval mode."""
    config = copy.deepcopy(checkpoint.model_config)
    # Float32 for both, so that the weights are compared and not the rounding of activations.
    kind = class_of(config)
    return kind.from_pretrained(checkpoint.folder, config=config, dtype=torch.float32).eval()


def apply_adapters(
    model: Any, base: Checkpoint, adapters: list[tuple[Adapter, float]], scratch: Path
) -> Any:
    """Wrap the base's ``model`` with the adapters in stock PEFT, each scaled by its weight."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    from moe_finetune.moe.lora_factors import quiet_patterns

    for index, (adapter, weight) in enumerate(adapters):
        name = f"adapter{index}"
        folder = peft_folder(adapter, base, scratch / name)
        with quiet_patterns():
            if index == 0:
                model = PeftModel.from_pretrained(model, folder, adapter_name=name)
            else:
                model.load_adapter(folder, adapter_name=name)
        for module in model.modules():
            if isinstance(module, LoraLayer) and name in module.scaling:
                module.scaling[name] *= weight
    model.base_model.set_adapter([f"adapter{index}" for index in range(len(adapters))])
    return model.eval()


@torch.no_grad()
def logits_of(
    model: Any,
    ids: list[Tensor],
    base: Checkpoint | None = None,
    bias: Mapping[int, Sequence[float]] | None = None,
) -> list[Tensor]:
    """Float64 logits for each row of token ids, with the routing ``bias`` set in the model."""
    if base is not None and bias and base.family.bias_export == "tensor":
        _set_bias(model, bias)
    return [model(input_ids=row).logits.double() for row in ids]


def _set_bias(model: Any, bias: Mapping[int, Sequence[float]]) -> None:
    for name, buffer in model.named_buffers():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and name.endswith(CORRECTION_BIASES) and int(layer[1]) in bias:
            buffer.copy_(torch.tensor([float(value) for value in bias[int(layer[1])]]))
