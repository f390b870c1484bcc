"""What each rank of ``test_reference_sharded.py`` runs: DPO whose reference follows the policy.

Its argument is FOLDER, under RANK and WORLD_SIZE 2. Two ranks shard policy and reference by FSDP2,
take a step of GRPO, and resume DPO; then the first of them takes DPO's rows alone.
"""

import logging
import os
import shutil
import sys
from pathlib import Path

import torch

from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import run_recipe
from moe_finetune.training import ranks
from tests.support import fsdp

WORLD, STEPS, SAVED = 2, 4, 2
PAIRS = [
    {"prompt": f"Say {n} ", "answer": "7", "chosen": f"yes {n * n:02d}", "rejected": f"no, {9 - n}"}
    for n in range(8)  # full batches only
]
TRAINER = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_steps": SAVED,
    "learning_rate": 1e-4,
    "adam_epsilon": 1e-5,
    "beta": 0.2,
    "report_to": [],
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "ref_model_mixup_alpha": 0.4,
}


GRPO = {
    "stage": "grpo",
    "trainer": {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 5,
        "beta": 0.2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    },
    "rewards": ["exact_match"],
}


def run(folder: Path, name: str, resume: bool = False, **changes: object) -> None:
    tree = {
        "stage": "dpo",
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "method": {"terms": {"orthogonality": {"weight": 0.1}}, "strength": {"first": False}},
        "lora": None,
        "router": {"train": "full"},
        "data": {"train": str(folder / "pairs.jsonl"), "max_length": 64},
        "trainer": {**TRAINER, "gradient_accumulation_steps": WORLD // ranks.world_size()},
        "export": {"merge": False, "verify": False},
    }
    run_recipe(recipe_from_tree(Tree({**tree, **changes})), folder / name, resume=resume)


def main(folder: Path) -> None:
    """Two ranks, both resumed, and one alone."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for mode in ("sharded", "resumed", "alone"):
        world = 1 if mode == "alone" else WORLD
        if int(os.environ.get("RANK", "0")) >= world:
            return
        if mode == "sharded":
            fsdp.use()
        fsdp.regroup(world)
        if mode == "resumed" and ranks.rank() == 0:
            shutil.copytree(folder / "sharded", folder / mode)
            for path in ("merged", f"checkpoints/checkpoint-{STEPS}", "summary.json"):
                target = folder / mode / path
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        ranks.barrier()
        run(folder, mode, resume=mode == "resumed")
        if mode == "sharded":
            run(folder, "grpo", **GRPO)
        ranks.barrier()


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(Path(sys.argv[1]))
