"""Check a family's declared facts against transformers' own class, one by one.

A small model of the checkpoint's type gets random weights and runs unchanged, recorded, with an
adapter, and merged. Each comparison is a :class:`Check`. The first group with a wrong fact ends the
proof, because later groups depend on it. Compared are:

1. the places of MoE layers, blocks, routers and experts, and their sizes;
2. the router's outputs, and that the block uses its weights;
3. the rule from logits to weights (score, renormalization, scaling) and selection (bias, groups);
4. LoRA's targets and the names on disk;
5. logits and gradients of the recorded model, the record, and a merged adapter;
6. packed rows, whose sequences must stay separate.
"""

import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moe_finetune.models.base import Family
from moe_finetune.models.find import using
from moe_finetune.training.proof_model import Check, random_model


@dataclass
class Proof:
    """The checks of one family; ``sizes`` describe the model that ran."""

    family: str
    model_type: str
    sizes: dict[str, int]
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        return [check.problem for check in self.checks if check.problem is not None]

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        sizes = ", ".join(f"{value} {name}" for name, value in self.sizes.items())
        end = "proved: the declared facts are those of transformers' class"
        if not self.ok:
            end = f"not proved: {len(self.problems)} of the declared facts are wrong"
        head = f"{self.model_type} as declared by family {self.family}, on a model of {sizes}"
        return "\n".join([head, *(check.line() for check in self.checks), end])


def prove(config: Any, family: Family) -> Proof:
    """Compare ``family`` with transformers' class for ``config``; takes seconds and little memory.

    Args:
        config: transformers' config of a checkpoint; a small one is used unchanged.

    Raises:
        CheckpointError: no small model of this type can be built.
    """
    from moe_finetune.models.shrink import shrunk_config
    from moe_finetune.training.proof_facts import fact_checks
    from moe_finetune.training.proof_runs import run_checks

    with torch.random.fork_rng(devices=[]), using(family), tempfile.TemporaryDirectory() as folder:
        smaller = shrunk_config(config, family)
        text = smaller.get_text_config()
        sizes = {
            "layers": text.num_hidden_layers,
            "hidden": text.hidden_size,
            "tokens of vocabulary": text.vocab_size,
        }
        proof = Proof(family.name, config.model_type, sizes)
        facts = fact_checks(random_model(smaller), family)
        runs = run_checks(partial(random_model, smaller), family, Path(folder))
        for group in chain(facts, runs):
            proof.checks += group
            if not proof.ok:
                break
    return proof
