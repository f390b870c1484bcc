"""A family's tiny model with an adapter, and one forward and backward of it."""

from __future__ import annotations

import warnings

import torch

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from tests import tiny_families as tiny

LORA = LoraSection(rank=4, alpha=12.0)


def adapted(family, router="lora", seed=3):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = add_lora(tiny.model(family), LORA, router)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    return model


def batch():
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def run(model):
    model.zero_grad()
    output = model(**batch())
    output.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), grads
