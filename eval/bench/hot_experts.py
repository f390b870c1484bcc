"""LoRA on the quarter of the experts that the rows use most, on as many at random, and on all.

Five short fine-tunes of the demo's checkpoint each, and what a step of a larger model with random
weights costs and what the adapters of two larger models hold.

    python eval/bench/hot_experts.py --save
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from geometries import GEOMETRIES
from saved import add_save, finish
from short_run import CHECKPOINT, MEASURED, demo_rows, fine_tune, paired
from transformers import AutoModelForCausalLM

from moe_finetune import Specialization, load_model
from moe_finetune.lora.select import ExpertSelection, expert_relevance, top_experts
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.routing.trace import RoutingTrace
from moe_finetune.routing.tracing import trace_model
from moe_finetune.training.memory.plan import plan_recipe

SHARE = 0.25
ARMS = ("all", "hot", "random")


def traced(rows, folder: Path, norms: bool = False) -> RoutingTrace:
    """The routing of the first training rows in the demo's checkpoint."""
    texts = [np.asarray(row["input_ids"], np.int32) for row in rows.train[:MEASURED]]
    model = load_model(CHECKPOINT, dtype="float32")
    trace_model(model, {"train": texts}, folder, checkpoint="demo", norms=norms)
    return RoutingTrace.open(folder)


def bench_demo(arguments, scratch: Path) -> dict:
    """The three arms by seed, and paired differences from all experts."""
    rows = demo_rows()
    trace = traced(rows, scratch / "trace")
    info = trace.info
    relevance_LE = expert_relevance(trace.load("ids"), None, info.num_experts)
    weights_LE = expert_relevance(
        trace.load("ids"), trace.load("weights"), info.num_experts, "gate"
    )
    runs: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    for seed in arguments.seeds:
        for arm in ARMS:
            experts, carried = "all", 1.0
            if arm != "all":
                drawn_LE = np.random.default_rng(seed).random(relevance_LE.shape)
                chosen = top_experts(relevance_LE if arm == "hot" else drawn_LE, SHARE)
                file = scratch / f"{arm}-{seed}.json"
                ExpertSelection(dict(zip(info.layers, chosen, strict=True))).write(file)
                experts = str(file)
                shares = (row[ids].sum() for row, ids in zip(weights_LE, chosen, strict=True))
                carried = sum(shares) / len(chosen)
            result = fine_tune(CHECKPOINT, rows, seed, experts=experts)
            runs[arm].append(result | {"seed": seed, "weight_share": carried})
            print(arm, runs[arm][-1], flush=True)
    keys = ("held_out", "sums", "step_seconds")
    pairs = {"hot - all": ("hot", "all"), "random - all": ("random", "all"),
             "hot - random": ("hot", "random")}  # fmt: skip
    differences = {
        name: {key: paired(runs[one], runs[other], key) for key in keys}
        for name, (one, other) in pairs.items()
    }
    return {"runs": runs, "differences": differences}


def bench_step(arguments) -> dict:
    """Medians of interleaved steps of a model of ``small-cpu``, by processor time."""
    make, layers = GEOMETRIES["small-cpu"]
    config = make()
    config.num_hidden_layers = layers
    variants = {}
    for name, share in (("all", None), ("hot", SHARE)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        lora = LoraSection(rank=32, targets=["attention", "experts"])
        chosen = None
        if share is not None:
            lora = lora.model_copy(update={"experts": {"top": share}})
            lora = LoraSection.model_validate(lora.model_dump())
            count = round(config.num_experts * share)
            chosen = {layer: list(range(count)) for layer in range(layers)}
        variants[name] = add_lora(model, lora, "frozen", "all", chosen).train()
    ids = torch.randint(0, config.vocab_size, (2, 512))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        for name, model in variants.items()
    }
    for turn in range(arguments.rounds + 1):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            model, start = variants[name], time.process_time()
            with Specialization(model, "none"):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if turn:
                seconds[name].append(time.process_time() - start)
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    return medians | {"hot/all": medians["hot"] / medians["all"]}


def planned() -> dict:
    """Trained parameters and the optimizer's bytes of true widths and depths, rank 32, by plan."""
    depths = {"qwen3_30b_a3b": 48, "deepseek_v2_lite": 27}
    sizes: dict[str, dict] = {}
    for name, depth in depths.items():
        config = GEOMETRIES[name][0]()
        config.num_hidden_layers = depth
        for arm, experts in (("all", "all"), ("hot", {"top": SHARE})):
            tree = {
                "model": {"path": "none"},
                "method": "none",
                "lora": {"rank": 32, "targets": ["attention", "experts"], "experts": experts},
                "data": {"train": "none.jsonl"},
            }
            stored = plan_recipe(config, recipe_from_tree(Tree(tree))).stored
            sizes.setdefault(name, {})[arm] = {
                "trained": stored.gradients // 4,
                "optimizer_bytes": stored.states,
            }
    return sizes


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=6)
    add_save(parser, "hot_experts")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        demo = bench_demo(arguments, Path(scratch))
    finish(arguments, {"demo": demo, "step": bench_step(arguments), "planned": planned()})


if __name__ == "__main__":
    main()
