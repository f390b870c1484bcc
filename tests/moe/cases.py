"""A tiny model with an adapter, and gradients to compare."""

import torch

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny
from tests.support.tiny_adapter import random_factors

TERMS = {
    "load_balance": {"weight": 0.3},
    "z_loss": {"weight": 0.02},
    "orthogonality": {"weight": 0.5},
    "variance": {"weight": 0.7},
}


def adapted(name: str, router: str = "lora", seed: int = 0):
    """A tiny model with random, non-zero LoRA on attention, experts, shared experts and router."""
    base = tiny.model(name, seed)
    torch.manual_seed(seed + 1)
    model = add_lora(base, LoraSection(rank=4, alpha=12.0), router)
    random_factors(model, 0.1)
    return model.train()


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: dict, theirs: dict, tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name, value in theirs.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert (ours[name] - value).abs().max() <= tolerance * scale, name
