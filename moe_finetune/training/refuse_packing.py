"""Test on a small model of the type whether sequences in a packed row see each other."""

from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.models import OURS, Family
from moe_finetune.models.class_structure import class_of, sites
from moe_finetune.models.composites import PARTS
from moe_finetune.models.small_configs import shrunk_config
from moe_finetune.moe.layers import causal_lm
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.observe import generators_kept, undisturbed

BOUND = 1e-4
"""Bound on the relative difference of float32 logits; leaks cause more than 1e-2."""

_LENGTHS = (13, 17, 9)


def packed_difference(model: nn.Module) -> float:
    """Largest difference of a sequence's logits packed and alone, relative to the largest logit."""
    config: Any = causal_lm(model).config
    most = min(260, config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(4, most, (length,), generator=generator) for length in _LENGTHS]
    device = next(model.parameters()).device
    positions = torch.cat([torch.arange(len(row)) for row in rows]).to(device)
    worst = 0.0
    with undisturbed(model), Recorder(model):
        packed = _logits(model, torch.cat(rows).to(device), positions)
        for row, part in zip(rows, packed.split(_LENGTHS), strict=True):
            separate = _logits(model, row.to(device), None)
            worst = max(worst, float((separate - part).abs().max() / separate.abs().max()))
    return worst


def _logits(model: nn.Module, ids: Tensor, positions: Tensor | None) -> Tensor:
    more = {} if positions is None else {"position_ids": positions[None]}
    return model(input_ids=ids[None], use_cache=False, **more).logits[0]


def packing_problem(config: Any, family: Family) -> str | None:
    """Why rows of this model cannot be packed; None where they can, as in the package's families.

    A plugin's family is tested on a small model of the type, which takes seconds.
    """
    if any(family is known for known in (*OURS, *PARTS)):
        return None
    try:
        smaller = shrunk_config(config, family)
    except CheckpointError as error:
        return f"whether sequences in one row see each other cannot be measured: {error}"
    with generators_kept():
        difference = packed_difference(random_model(smaller))
    if difference <= BOUND:
        return None
    return (
        f"sequences in one row see each other in {family.title}: logits change by "
        f"{difference:.0%} of the largest. List the classes of its stateful modules in the "
        "family's rows.per_sequence, and set rows.masks_by_position: false if its masks ignore "
        "positions"
    )


def check_packing(config: Any, family: Family) -> None:
    """Refuse to pack rows if a declared family does not keep sequences separate."""
    problem = packing_problem(config, family)
    if problem is not None:
        raise RecipeError(f"data.packing: {problem}; or set data.packing: false")


def random_model(config: Any) -> nn.Module:
    """A float32 model in eval mode whose routers, biases and norms are random too."""
    torch.manual_seed(0)
    model = class_of(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        for site in sites(model):
            tensors = dict([*site.block.named_parameters(), *site.block.named_buffers()])
            for name, path in site.routers:
                tensors[f"{name}.{path}"].normal_(0, 0.1)
            for name in site.biases:
                tensors[name].normal_(0, 0.1)
    return model
