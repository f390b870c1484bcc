"""Factors of projections that Tinker trains in parts, and the changes that they make.

Names, order and rows as tinker-cookbook reads them (``weights/_merge_utils.py``,
``_merge_qwen3_5.py``, ``_adapter.py``); each update is written out here, part by part.
"""

import torch

from tests.support.maker_formulas import ALPHA, RANK

SPLIT = {
    "qwen3_5_moe": ("linear_attn", "in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v")),
    "nemotron_h": ("mixer", "in_proj", ("gate_proj", "x_proj")),
}


def parts_of(name, module):
    """The rows of each part, in the fused projection's order, from the module's own sizes."""
    if name == "nemotron_h":
        return [module.intermediate_size, module.intermediate_size]
    return [module.key_dim, module.key_dim, module.value_dim]


@torch.no_grad()
def split_factors(name, model, places):
    """Tinker's tensors of each part, and the same change made in ``model``."""
    owner, fused, parts = SPLIT[name]
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for path, module in model.named_modules():
        if not (path.endswith(f".{owner}") and hasattr(module, fused)):
            continue
        weight, first = getattr(module, fused).weight, 0
        for part, rows in zip(parts, parts_of(name, module), strict=True):
            a = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
            b = torch.randn(rows, RANK, generator=generator) * 0.2
            tensors |= {f"{path}.{part}.lora_A.weight": a, f"{path}.{part}.lora_B.weight": b}
            weight[first : first + rows] += ALPHA / RANK * b @ a
            first += rows
    assert tensors
    return {key.replace(places.backbone, "model"): value for key, value in tensors.items()}
