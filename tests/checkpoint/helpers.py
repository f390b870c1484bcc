"""Random adapters of every kind on the tiny checkpoints, and logits to compare."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from moe_finetune.models import FAMILIES
from tests import tiny

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def load(folder: Path, dtype: torch.dtype = torch.float32):
    """The checkpoint in transformers, eval mode."""
    from transformers import AutoModelForCausalLM

    register(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def register(folder: Path) -> None:
    """Make transformers know the native classes."""
    from moe_finetune.models import deepseek_moe

    if "deepseek_moe" in folder.as_posix():
        deepseek_moe.register()


def shared_parameters(family: str) -> list[str]:
    """``target_parameters`` of the shared experts.

    PEFT 0.21 turns ``target_modules`` that end in ``up_proj`` into the fused experts, so the shared
    experts are named as parameters.
    """
    return [f"{target}.weight" for target in FAMILIES[family].shared_targets]


def adapter(base: Path, folder: Path, seed: int = 3, scale: float = 0.05, **options) -> Path:
    """Save a random adapter on ``base``: attention, shared experts, experts, router by default."""
    from peft import LoraConfig, get_peft_model

    family = next(f for f in FAMILIES if f in base.as_posix())
    settings = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": list(FAMILIES[family].attention_targets),
        "target_parameters": [*EXPERTS, "gate.weight", *shared_parameters(family)],
    } | options
    model = load(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(**settings))
    randomize(peft, seed, scale)
    peft.save_pretrained(folder, save_embedding_layers=False)
    return folder


def randomize(peft, seed: int, scale: float) -> None:
    """Random factors and random changes of the saved modules."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*peft.named_parameters(), *peft.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator) * scale
            if "lora_" in name:
                tensor.copy_(noise)
            elif "modules_to_save" in name:
                tensor.add_(noise)


@torch.no_grad()
def logits(model, seed: int = 1) -> torch.Tensor:
    """Logits on the fixed padded batch."""
    inputs = tiny.batch(seed=seed)
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def with_adapter(base: Path, folder: Path):
    """Base and adapter in stock PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), folder).eval()
