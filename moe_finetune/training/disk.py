"""The bytes that a run writes, looked at before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_finetune.io.folder import check_space
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.memory.stored import DEFAULT_OPTIMIZER, optimizer_of, state_bytes

if TYPE_CHECKING:
    from moe_finetune.training.preflight import Inputs

FLOAT32 = 4


def check_disk(recipe: Recipe, run: RunFolder, inputs: Inputs) -> None:
    """Refuse a run whose adapter, checkpoints and merged weights do not fit on its disk.

    Raises:
        DiskSpaceError: with the sizes needed and free.
    """
    trained = inputs.plan.coverage.total.trained_parameters
    weights = FLOAT32 * trained
    optimizer = optimizer_of(str(recipe.trainer.get("optim", DEFAULT_OPTIMIZER)))
    checkpoint = weights + state_bytes(optimizer, [(trained,)])
    needed = weights + _checkpoints(recipe.trainer, inputs.plan.steps) * checkpoint
    base = inputs.start.checkpoint
    if recipe.export.merge and inputs.start.adapted and base is not None:
        needed += sum(info.size for info in base.tensors.values())
    check_space(run.adapter, needed)


def _checkpoints(trainer: dict[str, Any], steps: int) -> int:
    """How many lie on the disk at once: one more than are kept, while the next is written."""
    if trainer.get("save_strategy") == "no":
        return 0
    interval = float(trainer.get("save_steps", 500))
    interval = interval if interval >= 1 else interval * steps
    written = max(1, int(steps // max(interval, 1)))
    return min(written, int(trainer.get("save_total_limit", 2) or written) + 1)
