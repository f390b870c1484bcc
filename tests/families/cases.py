"""Families by kind; a family's tiny model with an adapter, and one forward and backward of it."""

import torch

from moe_finetune.models import FAMILIES, OURS, composites, family_table
from tests.support import tiny_adapter
from tests.support import tiny_families as tiny

COMPOSITES = [family.name for family in composites.FAMILIES]
NAMES = [family.name for family in OURS if family not in family_table.CORE]
NEEDS_A_FILE = {"supervised_routing"}
STANDARD_WEIGHTS = [name for name in NAMES if FAMILIES[name].own_weights is None]

_KINDS = (
    "afmoe",  # masks are built; the router's weight lies deeper
    "aria",  # a composite whose router returns the index first, stacks transposed
    "deepseek_moe",  # our own class
    "deepseek_v2",  # exported with a bias that it has not
    "deepseek_v4",  # experts by token, compressed attention, square roots of softplus
    "gemma4",  # no block, a factor an expert
    "gpt_oss",  # biases of experts
    "granitemoehybrid",  # mamba beside stacks
    "hunyuan_v1_moe",  # padding moves positions
    "inkling_mm_model",  # rows of gate and up alternate, weights normalized with shared experts'
    "jamba",  # a router that returns logits alone
    "kolibri1",  # its bias is on the logits
    "nemotron_h_omni",  # experts without a gate, in a space of their own
    "phimoe",  # experts are sampled one after another
    "qwen3_next",  # delta nets, a gated shared expert
    "qwen3_vl_moe",  # stacks stored either way
)
KINDS = tuple(name for name in _KINDS if name in FAMILIES)
"""Families among which every value of a fact occurs, which ``test_every_family`` asks; those of a
later transformers where it is installed.
"""

EACH_KIND = [name for name in NAMES if name in KINDS]


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
