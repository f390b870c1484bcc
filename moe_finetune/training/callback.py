"""The specialization losses inside any transformers or TRL trainer.

    trainer = SFTTrainer(..., callbacks=[SpecializationCallback("orthogonal_variance")])

The callback puts the method on the trainer's model when training begins and takes it off when it
ends. ``attach(trainer)`` is optional: it lets the callback read the accumulation window from the
trainer (exact with unsized data and on a resume inside an epoch) and puts its values into what
every other logger sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from moe_finetune.capture.model import backbone_of
from moe_finetune.errors import ObjectiveError
from moe_finetune.method import Method, resolve_method
from moe_finetune.training import ranks
from moe_finetune.training.sample import evaluation_metrics
from moe_finetune.training.specialization import Specialization
from moe_finetune.training.state import STATE_FILE, load_state, save_state
from moe_finetune.training.window import AccumulationWindow

if TYPE_CHECKING:
    from transformers import Trainer

_OWN_BALANCE_LOSS = (
    "the trainer adds the checkpoint's own load-balancing loss (router_aux_loss_coef); pass "
    "router_aux_loss_coef=0.0 to the trainer's config and choose a method with load_balance"
)


def _check_equal_steps(dataloader: Any) -> None:
    """Refuse ranks with different numbers of batches: the one that goes on would wait for ever."""
    try:
        batches = len(dataloader)
    except TypeError:
        batches = -1  # unsized: max_steps ends all ranks alike
    if not ranks.equal_on_ranks(batches):
        raise ObjectiveError(
            f"the ranks have different numbers of batches (this one {batches}); give every rank "
            "as many, or let accelerate shard one dataset (even_batches: true)"
        )


class SpecializationCallback(TrainerCallback):
    """Adds a method's losses and routing metrics to a trainer.

    Args:
        method: a preset's name, or the same mapping as ``method:`` in a recipe.
        dropout: LoRA dropout inside the routed and shared experts (PEFT has none there).
        **overrides: keys of ``method:`` laid over the preset.

    Attributes:
        specialization: the method at work, from the beginning of training on.

    Raises:
        RecipeError: an unknown preset, term or option.
        ObjectiveError: when training begins: a term that reaches nothing trainable, fp16, or a
            trainer that adds a balance loss of its own.
    """

    def __init__(
        self, method: str | dict[str, Any] | Method, *, dropout: float = 0.0, **overrides: Any
    ):
        self.method = resolve_method(method, **overrides)
        self.dropout = dropout
        self.specialization: Specialization | None = None
        self._window = AccumulationWindow()

    def attach(self, trainer: Trainer) -> SpecializationCallback:
        """Read the accumulation window from ``trainer`` and log before its other callbacks."""
        if getattr(trainer, "aux_loss_enabled", False):
            raise ObjectiveError(_OWN_BALANCE_LOSS)
        self._window.trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    # -- the trainer's events -----------------------------------------------------------------

    def on_train_begin(self, args, state, control, model=None, **kwargs):  # noqa: D102
        if args.fp16:
            raise ObjectiveError(
                "fp16 scales the trainer's loss and not the injected terms; train in bf16"
            )
        if getattr(backbone_of(model).config, "output_router_logits", False):
            raise ObjectiveError(_OWN_BALANCE_LOSS)
        self._window.begin(args, kwargs.get("train_dataloader"), state)
        _check_equal_steps(kwargs.get("train_dataloader"))
        self.specialization = Specialization(model, self.method, dropout=self.dropout)
        self.specialization.recorder.scale = self._window.scale
        self.specialization.install()
        if state.global_step:
            self._load(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: D102
        self._window.step(state)
        self._at_work().begin_step(state.global_step, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):  # noqa: D102
        self._at_work().step()

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: D102
        if self.specialization is None or logs is None or "loss" not in logs:
            return
        values = self.specialization.read()
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)

    def on_evaluate(self, args, state, control, eval_dataloader=None, **kwargs):  # noqa: D102
        # The recorder is at work during training alone; an evaluation by itself has no method.
        if (
            self.specialization is None
            or not self.specialization.at_work
            or eval_dataloader is None
        ):
            return
        values = evaluation_metrics(self.specialization.recorder, eval_dataloader)
        if self._window.trainer is not None:
            self._window.trainer.log(values)
        else:
            state.log_history.append({**values, "step": state.global_step})

    def on_save(self, args, state, control, **kwargs):  # noqa: D102
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # A ResumableTrainer has written it already, as part of its verified checkpoint.
        if state.is_world_process_zero and folder.is_dir() and not (folder / STATE_FILE).exists():
            save_state(folder / STATE_FILE, self.table_state())

    def on_train_end(self, args, state, control, **kwargs):  # noqa: D102
        self.close()

    def close(self) -> None:
        """Take the method off the model; also right after an exception in the trainer."""
        if self.specialization is not None:
            self.specialization.restore()

    # -- what a ResumableTrainer saves and restores -------------------------------------------

    def table_state(self) -> dict[str, torch.Tensor]:
        """Tables and biases, equal on all ranks; loaded again when training begins."""
        return self._at_work().state_dict()

    def rank_state(self) -> dict[str, Any]:
        """What this rank has counted since the last log."""
        return self._at_work().statistics.state_dict()

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`rank_state` returned."""
        self._at_work().statistics.load_state_dict(state)

    def _at_work(self) -> Specialization:
        assert self.specialization is not None, "training has not begun"
        return self.specialization

    def _load(self, folder: Path) -> None:
        """Restore the state of the checkpoint that training resumed from."""
        work = self._at_work()
        if (folder / STATE_FILE).exists():
            work.load_state_dict(load_state(folder / STATE_FILE))
        elif work.state_dict():
            raise ObjectiveError(
                f"{folder} has no {STATE_FILE}, which this method needs to go on; resume from "
                "another checkpoint or start again"
            )
