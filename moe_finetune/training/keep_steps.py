"""Save the model at regular steps, for evaluation after training."""

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from moe_finetune.errors import DiskSpaceError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.callback import SpecializationCallback
from moe_finetune.training.save import save_trained

log = logging.getLogger(__name__)


class KeepSteps(TrainerCallback):
    """Saves the trained model, as at the end of a run, every ``evaluation.every`` steps.

    The run itself saves the last step. Training checkpoints are no substitute: sharded ones cannot
    be opened, and old ones are deleted.

    Args:
        model: see :func:`~moe_finetune.training.save.save_trained`.
        method: provides the routing bias that is saved with the model.
    """

    def __init__(
        self,
        recipe: Recipe,
        output: Path,
        model: Any,
        tokenizer: Any,
        method: SpecializationCallback,
    ):
        self.recipe, self.output, self.model = recipe, output, model
        self.tokenizer, self.method = tokenizer, method

    def on_step_end(self, args, state, control, **kwargs):
        section = self.recipe.evaluation
        step = state.global_step
        if section is None or section.every is None or step % section.every:
            return
        state_folder = RunFolder(self.output).step(step)
        # A resumed run passes steps that it saved before; only rank 0 writes.
        saved = ranks.rank() == 0 and state_folder.trained
        if step >= state.max_steps or ranks.any_rank(saved):
            return
        assert self.method.specialization is not None
        balancer = self.method.specialization.balancer
        try:
            save_trained(
                self.model,
                self.tokenizer,
                self.recipe,
                state_folder.path,
                balancer,
                self.method.run_metadata,
            )
        except (DiskSpaceError, OSError) as problem:  # of rank 0, for whom the others wait
            ranks.barrier()
            log.warning(
                "WARNING: the model after step %d could not be kept and will not be scored (%s)",
                step,
                problem,
            )
