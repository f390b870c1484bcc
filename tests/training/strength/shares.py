"""Weights that shares of 0.1 find in short runs; run as a program, it prints them."""

from pathlib import Path

import torch

from moe_finetune.training.specialization import Specialization
from tests.support import tiny
from tests.support.goldens import lines_of
from tests.training.cases import adapted
from tests.training.strength.strength import TERMS

FILE = Path(__file__).with_name("shares.json")
FAMILIES = ("qwen3_moe", "deepseek_v3", "mixtral")
EVERY = {"variance": 2, "dpp": 1, "load_balance": 3}


def weights(family: str) -> dict[str, list[float]]:
    """Each term's weight after each of four steps."""
    model = adapted(family).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    terms = {}
    for name, options in TERMS.items():
        if name == "supervised_routing":
            continue
        terms[name] = {**options, "weight": None, "share": 0.1}
        if name in EVERY:
            terms[name]["every"] = EVERY[name]
    found: dict[str, list[float]] = {name: [] for name in terms}
    with Specialization(model, {"terms": terms}, accumulation=2, total_steps=4) as work:
        for step in range(4):
            for seed in (2 * step, 2 * step + 1):
                (model(**tiny.batch(seed=seed)).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            work.step()
            for name, row in found.items():
                row.append(work.objective.full_weights[name])
    return found


if __name__ == "__main__":
    print(lines_of({family: weights(family) for family in FAMILIES}))
