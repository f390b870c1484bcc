"""A checkpoint's model twice: quantized, and with the same values in ordinary tensors."""

from pathlib import Path
from typing import Any

import torch

from moe_finetune import load_model
from moe_finetune.models import family_table
from moe_finetune.quantization.weight import QuantizedWeight, quantized
from tests.support import tiny, tiny_families

FAMILIES = (*tiny.FAMILY_NAMES, *(family.name for family in family_table.FAMILIES))


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The tiny checkpoint of any family."""
    home = tiny if family in tiny.FAMILY_NAMES else tiny_families
    home.model(family).to(dtype).save_pretrained(folder)
    return folder


def dequantized(folder: Path, dtype: str = "float32") -> Any:
    """The ordinary model with the values of the quantized one."""
    held = dict(load_model(folder, dtype=dtype, quantization="nf4").named_parameters())
    model = load_model(folder, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if quantized(held[name]):
                parameter.copy_(held[name].dequantize())
    return model


def check_quantized(folder: Path, stock: dict[str, torch.Tensor]) -> None:
    """Loaded quantized, the checkpoint has the values of ``stock``, quantized or as they are."""
    state = load_model(folder, dtype="float32", quantization="nf4").state_dict()
    assert stock.keys() == state.keys()
    for name, value in stock.items():
        if quantized(state[name]):
            packed = QuantizedWeight.of(value)
            assert torch.equal(state[name].dequantize(), packed.dequantize()), name
        else:
            assert torch.equal(state[name], value), name


def batch() -> dict[str, Any]:
    """Token ids with labels."""
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "use_cache": False}
