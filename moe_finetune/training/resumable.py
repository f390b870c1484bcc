"""A mixin for transformers' Trainer: checkpoints that resume bit for bit, without pickle.

    class MyTrainer(ResumableTrainer, Trainer): ...

It replaces how a checkpoint is written and read: weights (a PEFT adapter, or without one an
ordinary checkpoint), optimizer, scheduler, random state of every rank, callbacks' tables, and
counts since the last log. With FSDP2 each rank writes and reads its own parts, and a different
number of ranks can read them. The stock ``optimizer.pt``, ``scheduler.pt``, ``rng_state.pth`` and
``training_args.bin`` are neither written nor read. See :mod:`moe_finetune.training.checkpoint` for
the folder.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from moe_finetune.checkpoint.adapter import WEIGHTS as ADAPTER_FILE
from moe_finetune.errors import CheckpointError, DiskSpaceError
from moe_finetune.io import clear_leftovers
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import (
    newest_checkpoint,
    rotate,
    verify_checkpoint,
    write_checkpoint,
)
from moe_finetune.training.checkpoint_parts import (
    OPTIMIZER,
    OPTIMIZER_FILE,
    WEIGHTS,
    check_rows,
    checkpoint_parts,
)
from moe_finetune.training.full_weights import live_weights, set_weights
from moe_finetune.training.model_files import StoredWeights
from moe_finetune.training.optimizer_state import empty_moments, load_optimizer_state
from moe_finetune.training.rank_state import read_rank, read_tensors, set_random_state
from moe_finetune.training.shards import read_shards, stored
from moe_finetune.training.state import load_state, unpack

# The other base, at run time any transformers Trainer; its attributes are used throughout.
_Trainer: Any = object

log = logging.getLogger(__name__)


class ResumableTrainer(_Trainer):
    """Exact, verified, pickle-free checkpoints for any Trainer. Make it the first base class."""

    # -- writing ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        root = Path(self._get_output_dir(trial=trial))
        target = root / f"checkpoint-{self.state.global_step}"
        self.store_flos()
        self._note_best(root, target)
        # Gathering is collective, so all ranks gather before rank 0 writes.
        problem: Exception | None = None
        try:
            parts, entries = checkpoint_parts(self, target, self._ours())
        except OSError as error:  # of the shards, on all ranks
            return self._report_failed_save(root, target, error)
        if self.args.should_save:
            try:
                write_checkpoint(target, parts, entries)
                best = self.state.best_model_checkpoint
                rotate(root, self.args.save_total_limit, Path(best) if best else None)
            except (OSError, DiskSpaceError, SafetensorError) as error:
                problem = error
        if ranks.any_rank(problem is not None):
            self._report_failed_save(root, target, problem)

    def _ours(self) -> list[Any]:
        return [c for c in self.callback_handler.callbacks if hasattr(c, "rank_state")]

    def _note_best(self, root: Path, target: Path) -> None:
        step = self.state.best_global_step
        if step and (step == self.state.global_step or (root / f"checkpoint-{step}").is_dir()):
            self.state.best_model_checkpoint = str(root / f"checkpoint-{step}")

    def _report_failed_save(self, root: Path, target: Path, problem: Exception | None) -> None:
        """Warn about a failed save instead of ending the run: the next one may succeed."""
        if not self.args.should_save:
            return
        clear_leftovers(root)
        last, _ = newest_checkpoint(root)
        log.warning(
            "WARNING: %s could not be saved (%s). Training continues; the last good checkpoint "
            "is %s. Free some disk space, or raise trainer.save_steps.",
            target,
            problem,
            last or "none; if the run stops now, it has to start from the beginning",
        )

    # -- reading ------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint to resume from is verified first.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest that verifies
                (from the start if there is none).

        Raises:
            CheckpointError: the checkpoint is damaged or belongs to another run, or DeepSpeed is in
                use, which pickles its optimizer.
        """
        if self.is_deepspeed_enabled:
            raise CheckpointError(
                "DeepSpeed keeps the optimizer in pickle files, which are never loaded, so a run "
                "could not resume; use FSDP2 (recipes/hardware/fsdp2_8gpu.yaml)"
            )
        root = Path(self.args.output_dir)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_checkpoint(root)
        elif resume_from_checkpoint:
            _verify(Path(resume_from_checkpoint))
        if self.args.should_save:
            clear_leftovers(root)
        path = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if path:
            check_rows(Path(path), self.args)
            # The random state is set twice. Here, since the loader draws the seed of its order
            # when it is made; and in _load_rng_state, right before the first new batch, since
            # making the loader, the optimizer and skipping rows have drawn from it again.
            set_random_state(self._rank_state(path)["random"])
        return super().train(path, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        model = model if model is not None else self.model
        if getattr(self.model, "peft_config", None) is not None:
            file = folder / ADAPTER_FILE
            set_weights(model, load_state(file), str(file))
        elif any(name.startswith(f"{WEIGHTS}/") for name in stored(folder)):
            live = live_weights(model)
            read_shards(folder, {f"{WEIGHTS}/{name}": t.detach() for name, t in live.items()})
        else:
            set_weights(model, StoredWeights(folder, model), str(folder))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        log.info("returning to the best checkpoint, %s (%s)", best, self.state.best_metric)
        _verify(Path(best))
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        metadata, tensors = read_tensors(folder / OPTIMIZER_FILE)
        state = unpack(json.loads(metadata["state"]), tensors)
        prefix = f"{OPTIMIZER}/"
        shapes = {
            n.removeprefix(prefix): s for n, s in stored(folder).items() if n.startswith(prefix)
        }
        moments = empty_moments(self.model, shapes)
        read_shards(folder, {prefix + name: tensor for name, tensor in moments.items()})
        for name, tensor in moments.items():
            parameter, _, key = name.rpartition("/")
            state["optimizer"]["state"].setdefault(parameter, {})[key] = tensor
        where = str(folder / OPTIMIZER_FILE)
        load_optimizer_state(self.optimizer, self.model, state["optimizer"], where)
        self.lr_scheduler.load_state_dict(state["scheduler"])

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: fp16 is refused."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: fp16 is refused."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random state; the Trainer calls this right before the first batch."""
        if checkpoint is None:
            return
        state = self._rank_state(checkpoint)
        set_random_state(state["random"])
        self._tr_loss += state["loss"].to(self._tr_loss.device)
        self._total_loss_scalar = state["total_loss"]
        if hasattr(self, "load_rollout_state"):
            self.load_rollout_state(state["rollouts"])
        self._globalstep_last_logged = state["last_logged"]
        # The checkpoint's state has the intervals of the run that wrote it.
        self.state.compute_steps(self.args, self.state.max_steps)
        for mode, values in state["metrics"].items():
            self._metrics[mode].update(values)
        if state["tokens"] is not None:
            self._total_train_tokens = state["tokens"]
        for callback, saved in zip(self._ours(), state["statistics"], strict=True):
            callback.load_rank_state(saved)

    def _rank_state(self, checkpoint: str) -> dict[str, Any]:
        args = self.args
        return read_rank(Path(checkpoint), args.process_index, args.world_size, self._ours())

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # The Trainer divides the sum over all steps by the number of those since the resume.
        if self._initial_global_step:
            trained = max(self.state.global_step - self._initial_global_step, 0.001)
            unlogged = self._tr_loss.item()
            mean = (self._total_loss_scalar + unlogged) / self.state.global_step
            self._total_loss_scalar = mean * trained - unlogged
        return super()._finalize_training(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run that was stopped between its last save and its end has nothing left to train, but
        # the Trainer would go on to the end of the epoch.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # -- elsewhere ----------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write what ``save_model`` writes, without the pickled ``training_args.bin``."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        (folder / "training_args.bin").unlink(missing_ok=True)


def find_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint under ``root`` that verifies; skipped ones are logged.

    Rank 0 decides, so all ranks resume from the same one.
    """
    answer = b""
    if ranks.rank() == 0:
        newest, problems = newest_checkpoint(root)
        for problem in problems:
            log.warning("--resume: skipped: %s", problem)
        if newest is None:
            log.warning("--resume: no complete checkpoint in %s; starting from the beginning", root)
        else:
            log.info("--resume: continuing from %s", newest)
            answer = os.fsencode(newest)
    answer = ranks.gather_bytes(answer)[0]
    return Path(os.fsdecode(answer)) if answer else None


def _verify(folder: Path) -> None:
    """Verify a checkpoint together: each rank reads its share of the bytes.

    Raises:
        CheckpointError: it does not verify; raised on all ranks.
    """
    problem: CheckpointError | None = None
    try:
        verify_checkpoint(folder, share=(ranks.rank(), ranks.world_size()))
    except CheckpointError as error:
        problem = error
    if ranks.any_rank(problem is not None):
        raise problem or CheckpointError(f"{folder}: is damaged; see the other ranks' messages")
