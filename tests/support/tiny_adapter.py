"""A tiny model's adapter, which does something from the start."""

import warnings
from typing import Any

import torch

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection

LORA = LoraSection(rank=4, alpha=12.0)


def adapted(model: Any, router: str = "full", lora: LoraSection = LORA) -> Any:
    """``model`` with random LoRA factors wherever it can have them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model that has no shared experts
        model = add_lora(model, lora, router)
    torch.manual_seed(3)
    random_factors(model, 0.05)
    return model


@torch.no_grad()
def random_factors(model: Any, scale: float) -> None:
    """Normal LoRA factors of this standard deviation, in the order of the parameters."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, scale)
