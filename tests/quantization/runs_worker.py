"""A recipe on quantised weights from start to merge, on each rank of ``test_ranks.py``.

``python -m tests.quantization.runs_worker FOLDER MODE`` with MODE "alone", "sharded" (FSDP2, as its
launcher's config sets it up) or "spread" (``parallel.experts``); FOLDER has ``recipe.yaml``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from moe_finetune import run_recipe
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.training import ranks
from tests import fsdp

GLOBAL_BATCH = 4


def main(folder: Path, mode: str) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks.join_group()
    if mode == "sharded":
        fsdp.use()
    changes = [f"trainer.per_device_train_batch_size={GLOBAL_BATCH // ranks.world_size()}"]
    if mode == "spread":
        changes.append("parallel.experts=all")
    run_recipe(load_recipe(folder / "recipe.yaml", changes), folder / mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
