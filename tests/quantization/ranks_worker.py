"""What each rank of ``test_ranks.py`` runs: training steps on quantized weights that ranks share,
and a recipe on them from start to merge.

``python -m tests.quantization.ranks_worker FOLDER`` under RANK and WORLD_SIZE 2. Of the steps the
whole model sees both ranks' batches one after the other, in every process; of the others each rank
sees its own batch, and gradients are averaged.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_finetune import Specialization, load_model, run_recipe
from moe_finetune.lora.targets import add_lora
from moe_finetune.quantization.weight import local_weight
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training import ranks
from tests.support import fsdp, tiny, tiny_families
from tests.support.ranks import furthest
from tests.support.tiny_adapter import random_factors

WORLD, GLOBAL_BATCH = 2, 4
ALONE = "alone"
METHOD = {
    "terms": {
        "erc": {"weight": 0.3},  # reads the gate projections of all experts
        "coupling": {"weight": 2.0},
        "orthogonality": {"weight": 0.5},
        "load_balance": {"weight": 0.1},
    },
    "strength": {"first": False},
}
BOTH = ("sharded", "spread")
CASES = {
    "nf4": ("qwen3_moe", {}, {"quantization": "nf4"}, BOTH),
    "grouped": ("qwen3_moe", {}, {"quantization": "nf4", "kernel": "grouped"}, BOTH),
    "transposed": ("gpt_oss", {}, {"quantization": "nf4"}, BOTH),
    "outer factors of all experts": (
        "qwen3_moe",
        {},
        {"quantization": "nf4", "shared_outer": True},
        BOTH,
    ),
    "uneven": ("qwen3_moe", {"num_experts": 7}, {"quantization": "nf4"}, ("sharded",)),
}
"""Family, changes of its config, how it is loaded and run, and how ranks share it."""


def model(folder: Path, quantization: str, spread: bool, shared_outer: bool = False) -> Any:
    base = load_model(
        folder, "float32", quantization=quantization, expert_ranks=WORLD if spread else 1
    )
    torch.manual_seed(1)
    adapted = add_lora(base, LoraSection(rank=4, alpha=8.0, shared_outer=shared_outer), "full")
    random_factors(adapted, 0.1)
    return adapted.train()


def packed_bytes(built: Any) -> int:
    """Bytes of this rank's packed weights."""
    weights = map(local_weight, built.parameters())
    return sum(weight.stored_bytes for weight in weights if weight is not None)


def run(folder: Path, mode: str, kernel: str = "loop", **loaded: Any) -> dict[str, Any]:
    """Loss, gradients and packed bytes of two steps, the second after an update."""
    built = model(folder, spread=mode == "spread", **loaded)
    if mode == "sharded":
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in built.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(built, mesh=mesh)
    batches = range(WORLD) if mode == "whole" else [ranks.rank()]
    trained = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    with Specialization(built, METHOD, accumulation=len(batches), kernel=kernel) as work:
        for step in range(2):
            optimizer.zero_grad()
            losses = []
            for rank in batches:
                torch.manual_seed(100 + rank)
                batch = tiny.batch(rows=2, length=11 + rank, seed=7 + rank + 10 * step)
                loss = built(**batch).loss / len(batches)
                loss.backward()
                losses.append(float(loss))
            if mode == "spread":  # as the Trainer does for what it did not shard
                for parameter in trained:
                    distributed.all_reduce(parameter.grad)
                    parameter.grad /= WORLD
            if step == 0:
                optimizer.step()
                work.step()
    return {
        "loss": sum(losses),
        "bytes": packed_bytes(built),
        "gradients": {
            name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
            for name, p in built.named_parameters()
            if p.grad is not None
        },
    }


def compare(folder: Path, options: dict[str, Any], modes: tuple[str, ...]) -> dict[str, Any]:
    """By mode the distance to the whole model in one process, or the error."""
    whole = run(folder, "whole", **options)
    rows: dict[str, Any] = {"tensors": len(whole["gradients"])}
    for mode in modes:
        try:
            got = run(folder, mode, **options)
        except Exception as error:
            import traceback

            traceback.print_exc()
            rows[mode] = {"error": f"{type(error).__name__}: {error}"[:600]}
            continue
        loss = torch.tensor(got["loss"])
        distributed.all_reduce(loss)
        rows[mode] = {
            "gradients": furthest(got["gradients"], whole["gradients"]),
            "loss": [whole["loss"], float(loss) / WORLD],
            "bytes": got["bytes"] / whole["bytes"],
        }
    return rows


def recipe(folder: Path, mode: str, world: int, shared: bool) -> Any:
    terms = {"erc": {"weight": 0.3}, "load_balance": {"weight": 0.3, "scope": "global_batch"}}
    return recipe_from_tree(
        Tree(
            {
                "model": {
                    "path": str(folder / "base"),
                    "dtype": "float32",
                    "quantization": "nf4",
                },
                "method": {"terms": terms},
                "lora": {"rank": 4, "alpha": 8.0, "shared_outer": shared},
                "data": {
                    "train": str(folder / "data.jsonl"),
                    "max_length": 24,
                    "packing": False,
                },
                "trainer": {
                    "max_steps": 2,
                    "save_steps": 2,
                    # Steps in proportion to the gradients: Adam would divide the rounding of a
                    # small one by its size.
                    "optim": "sgd",
                    "learning_rate": 0.5,
                    "per_device_train_batch_size": GLOBAL_BATCH // world,
                    "report_to": "none",
                },
                "parallel": {"experts": "all" if mode == "spread" else 1},
            }
        )
    )


def run_name(mode: str, shared: bool) -> str:
    """The folder of a recipe's run."""
    return f"{mode}, outer factors of all experts" if shared else mode


def main(folder: Path) -> None:
    """Run all cases in one job, then the recipe with experts spread, by FSDP2, and alone."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks.join_group()
    rows = {}
    for case, (family, changes, options, modes) in CASES.items():
        source = tiny if family in tiny.FAMILY_NAMES else tiny_families
        source.model(family, **changes).save_pretrained(folder / case)  # rank 0 alone writes
        ranks.barrier()
        rows[case] = compare(folder / case, options, modes)
    if ranks.rank() == 0:
        (folder / "measured.json").write_text(json.dumps(rows))
    for mode in (*reversed(BOTH), ALONE):
        world = 1 if mode == ALONE else WORLD
        if int(os.environ.get("RANK", "0")) >= world:
            return
        if mode == "sharded":  # as its launcher's config sets it up
            fsdp.use()
        fsdp.regroup(world)
        for shared in (False, True):
            run_recipe(recipe(folder, mode, world, shared), folder / run_name(mode, shared))


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(Path(sys.argv[1]))
