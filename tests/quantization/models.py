"""A checkpoint's model twice: quantized, and with the same values in ordinary tensors."""

from pathlib import Path
from typing import Any

import torch

from moe_finetune import load_model
from moe_finetune.models import table
from moe_finetune.quantization.weight import quantized
from tests import tiny, tiny_families

FAMILIES = (*tiny.FAMILY_NAMES, *(family.name for family in table.FAMILIES))


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The tiny checkpoint of any family."""
    home = tiny if family in tiny.FAMILY_NAMES else tiny_families
    home.model(family).to(dtype).save_pretrained(folder)
    return folder


def dequantized(folder: Path, kind: str, dtype: str = "float32") -> Any:
    """The ordinary model with the values of the quantized one."""
    held = dict(load_model(folder, dtype=dtype, quantization=kind).named_parameters())
    model = load_model(folder, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if quantized(held[name]):
                parameter.copy_(held[name].dequantize())
    return model


def batch() -> dict[str, Any]:
    """Token ids with labels."""
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "use_cache": False}
