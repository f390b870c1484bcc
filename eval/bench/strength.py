"""The cost of measuring strength once, in training steps per loss term.

A step is forward, backward and the optimizer's update, as in ``step.py``; the figure is the
additional time of a step that measures strength. Both alternate in one process, for each set of
terms. Times are processor seconds, so that other work on the machine does not count.

    python eval/bench/strength.py --geometry small-cpu --rounds 9
    python eval/bench/strength.py --gradient-checkpointing
"""

import argparse
import statistics
import time
from typing import Any

import torch
from geometries import GEOMETRIES
from saved import add_save, finish
from variants import ALL_TERMS, build

from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.layers import backbone_of
from moe_finetune.training.specialization import Specialization

PRESETS_TIMED = ("aux_loss", "orthogonal_variance", "specialization_coupling", "erc")
SETS: dict[str, dict[str, Any]] = {name: dict(PRESETS[name].terms) for name in PRESETS_TIMED}
SETS["ten terms"] = ALL_TERMS


def timed(model: torch.nn.Module, terms: dict[str, Any], batch: dict, rounds: int) -> dict:
    """Median seconds of a plain step and of measuring, and their ratio per term."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    steps, measured = [], []
    with Specialization(model, {"terms": terms, "strength": {"first": False}}) as work:
        for round_ in range(rounds + 1):
            start = time.process_time()
            step(model, batch, optimizer)
            plain = time.process_time() - start
            work.step()
            work.strength.begin(work.steps, due=True)
            before = time.process_time()
            step(model, batch, optimizer)
            both = time.process_time() - before
            work.step()
            if round_:  # the first is a warm-up
                steps.append(plain)
                measured.append(both - plain)
    step_s, extra_s = statistics.median(steps), statistics.median(measured)
    return {
        "terms": len(terms),
        "step_ms": round(1e3 * step_s, 1),
        "measuring_ms": round(1e3 * extra_s, 1),
        "steps_a_term": round(extra_s / step_s / len(terms), 3),
    }


def step(model: Any, batch: dict, optimizer: torch.optim.Optimizer) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="small-cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    add_save(parser, "strength_cost")
    arguments = parser.parse_args()
    arguments.train_router = True
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = build(arguments, experts=True)
    generator = torch.Generator().manual_seed(1)
    rows = max(arguments.tokens // arguments.length, 1)
    vocabulary = backbone_of(model).config.vocab_size
    ids = torch.randint(0, vocabulary, (rows, arguments.length), generator=generator)
    ids = ids.to(arguments.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    figures = {name: timed(model, SETS[name], batch, arguments.rounds) for name in arguments.only}
    finish(arguments, {"sets": figures})


if __name__ == "__main__":
    main()
