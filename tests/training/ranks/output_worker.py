"""One of two ranks of a plain Trainer whose callback writes a run: without a break, and killed.

``python -m tests.training.ranks.output_worker BASE FOLDER`` leaves ``FOLDER/whole`` and
``FOLDER/resumed``, a run that raised in its third step and was resumed from the second.
"""

import sys
from pathlib import Path

from transformers import Trainer, TrainerCallback

from moe_finetune import SpecializationCallback
from tests.training.cases import arguments, collate, loaded, rows

STEPS = 4
METHOD = {
    "terms": {
        "orthogonality": {"weight": 0.05},
        "variance": {"share": 0.1},
        "coupling": {"weight": 0.1},
    }
}


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEPS - 1:
            raise KeyboardInterrupt


def train(base: Path, checkpoints: Path, run: Path, resume=None, killed=False) -> None:
    callback = SpecializationCallback(METHOD, output=run)
    args = arguments(
        checkpoints,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=2,
        ddp_find_unused_parameters=False,
    )
    args.max_steps, args.save_strategy = STEPS, "steps"
    trainer = Trainer(
        loaded(base),
        args,
        data_collator=collate,
        callbacks=[callback, *([Killed()] if killed else [])],
        train_dataset=rows(17),
        eval_dataset=rows(5, seed=2),
    )
    callback.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)


def main(base: str, folder: str) -> None:
    target = Path(folder)
    train(Path(base), target / "a", target / "whole")
    try:
        train(Path(base), target / "b", target / "resumed", killed=True)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the run was to be killed")
    train(Path(base), target / "b", target / "resumed", str(target / "b" / "checkpoint-2"))


if __name__ == "__main__":
    main(*sys.argv[1:])
