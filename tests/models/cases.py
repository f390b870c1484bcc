"""A family's tiny model with an adapter, and one forward and backward of it."""

import torch

from moe_finetune.models import FAMILIES, table
from tests import tiny_adapter
from tests import tiny_families as tiny

COMPOSITES = [family.name for family in table.COMPOSITES]
NAMES = [family.name for family in table.FAMILIES] + COMPOSITES
NEEDS_A_FILE = {"supervised_routing"}
STANDARD_WEIGHTS = [name for name in NAMES if FAMILIES[name].own_weights is None]


def adapted(family, router="lora"):
    return tiny_adapter.adapted(tiny.model(family), router)


def batch():
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def run(model):
    model.zero_grad()
    output = model(**batch())
    output.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), grads
