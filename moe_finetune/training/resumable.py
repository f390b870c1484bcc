"""A mixin for transformers' Trainer: checkpoints that resume bit for bit, without pickle.

    class MyTrainer(ResumableTrainer, Trainer): ...

It replaces how a checkpoint is written and read: weights (an ordinary PEFT adapter where there is
one, else an ordinary checkpoint), optimizer, scheduler, random numbers of every rank, callbacks'
tables, and what was counted since the last log. The stock ``optimizer.pt``, ``scheduler.pt``,
``rng_state.pth`` and ``training_args.bin`` are neither written nor read. See
:mod:`moe_finetune.training.checkpoint` for the folder.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from moe_finetune.errors import CheckpointError
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import (
    clear_leftovers,
    newest_checkpoint,
    rotate,
    verify_checkpoint,
    write_bytes,
    write_checkpoint,
)
from moe_finetune.training.optimizer_state import (
    load_optimizer_state,
    optimizer_state,
    unshared,
)
from moe_finetune.training.ordinary import StoredWeights, write_model
from moe_finetune.training.plain_state import pack, unpack
from moe_finetune.training.random_state import random_state, set_random_state
from moe_finetune.training.save import ADAPTER_FILE, write_adapter
from moe_finetune.training.state import TRAINER_FILE, load_state
from moe_finetune.training.whole import set_weights, trained_weights, whole_model

# The other base, at run time any transformers Trainer; its attributes are used throughout.
_Trainer: Any = object

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"


class ResumableTrainer(_Trainer):
    """Exact, verified, pickle-free checkpoints for any Trainer. Put it first among the bases."""

    # -- writing ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        root = Path(self._get_output_dir(trial=trial))
        target = root / f"checkpoint-{self.state.global_step}"
        self.store_flos()
        self._note_best(root, target)
        # Gathering is collective, so it happens on all ranks before rank 0 writes alone.
        parts = self._parts()
        problem: Exception | None = None
        if self.args.should_save:
            try:
                write_checkpoint(target, parts)
                best = self.state.best_model_checkpoint
                rotate(root, self.args.save_total_limit, Path(best) if best else None)
            except (OSError, SafetensorError) as error:
                problem = error
        if ranks.any_rank(problem is not None):
            self._report_failed_save(root, target, problem)

    def _parts(self) -> dict[str, Any]:
        """Functions that write the checkpoint's files, by what they write."""
        adapted = getattr(self.model, "peft_config", None) is not None
        weights = trained_weights(self.model) if adapted else whole_model(self.model)
        tensors: dict[str, Tensor] = {}
        optimizer = {"optimizer": {}, "scheduler": self.lr_scheduler.state_dict()}
        if not self.is_deepspeed_enabled:
            optimizer["optimizer"] = optimizer_state(self.optimizer, self.model)
        packed = pack(optimizer, tensors, "")
        blobs = ranks.gather_bytes(self._rank_blob())

        def write_weights(folder: Path) -> None:
            if not adapted:
                write_model(self.model, weights, self.processing_class, folder)
                return
            write_adapter(self.model, weights, folder)
            for callback in self._ours():
                callback.describe_adapter(folder)

        def write_optimizer(folder: Path) -> None:
            meta = {"state": json.dumps(packed), "resumable": str(not self.is_deepspeed_enabled)}
            save_file(unshared(tensors), folder / OPTIMIZER_FILE, metadata=meta)

        def write_ranks(folder: Path) -> None:
            for number, blob in enumerate(blobs):
                write_bytes(folder / _rank_file(number), blob)

        def write_trainer(folder: Path) -> None:
            self._export_callbacks()
            self.state.save_to_json(str(folder / TRAINER_FILE))

        return {
            "weights": write_weights,
            "optimizer": write_optimizer,
            "ranks": write_ranks,
            "trainer": write_trainer,
        }

    def _rank_blob(self) -> bytes:
        """What differs between ranks: random numbers, and sums since the last log."""
        tensors: dict[str, Tensor] = {}
        state = {
            "world_size": self.args.world_size,
            "random": random_state(),
            "loss": self._tr_loss,
            "last_logged": self._globalstep_last_logged,
            "metrics": {k: dict(v) for k, v in getattr(self, "_metrics", {}).items()},
            "tokens": getattr(self, "_total_train_tokens", None),
            "statistics": [c.rank_state() for c in self._ours()],
        }
        packed = pack(state, tensors, "")
        held = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        return save(held, metadata={"state": json.dumps(packed)})

    def _ours(self) -> list[Any]:
        return [c for c in self.callback_handler.callbacks if hasattr(c, "rank_state")]

    def _export_callbacks(self) -> None:
        """Note what stateful callbacks hold (tables, biases), as the stock Trainer does."""
        from transformers.trainer_callback import ExportableState

        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()

    def _note_best(self, root: Path, target: Path) -> None:
        step = self.state.best_global_step
        if step and (step == self.state.global_step or (root / f"checkpoint-{step}").is_dir()):
            self.state.best_model_checkpoint = str(root / f"checkpoint-{step}")

    def _report_failed_save(self, root: Path, target: Path, problem: Exception | None) -> None:
        """A save that failed must not end the run: the next one may find room."""
        if not self.args.should_save:
            return
        last, _ = newest_checkpoint(root)
        log.warning(
            "WARNING: %s could not be saved (%s). Training goes on; the last good checkpoint is "
            "%s. Make room on this disk, or raise trainer.save_steps.",
            target,
            problem,
            last or "none: if the run stops now, it starts from the beginning",
        )

    # -- reading ------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint to resume from is verified first.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest that verifies
                (the beginning when there is none).
            *args: as in transformers.
            **kwargs: as in transformers.

        Raises:
            CheckpointError: the named checkpoint is damaged, or of another run.
        """
        root = Path(self.args.output_dir)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_checkpoint(root)
        elif resume_from_checkpoint:
            verify_checkpoint(Path(resume_from_checkpoint))
        if self.args.should_save:
            clear_leftovers(root)
        path = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if path:
            # The order of the data comes from the generator's seed, which the state holds.
            set_random_state(self._rank_state(path)["random"])
        return super().train(path, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        adapted = getattr(self.model, "peft_config", None) is not None
        model = model if model is not None else self.model
        file = folder / ADAPTER_FILE
        weights = load_state(file) if adapted else StoredWeights(folder, model)
        set_weights(model, weights, str(file if adapted else folder))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        log.info("going back to the best checkpoint, %s (%s)", best, self.state.best_metric)
        verify_checkpoint(Path(best))
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        file = Path(checkpoint) / OPTIMIZER_FILE
        metadata, tensors = _read(file)
        if metadata["resumable"] != "True" or self.is_deepspeed_enabled:
            raise CheckpointError(
                f"{file}: DeepSpeed keeps the optimizer in pickle files, which are never loaded, "
                "so its runs cannot resume; start again, or use recipes/hardware/fsdp2_8gpu.yaml"
            )
        state = unpack(json.loads(metadata["state"]), tensors)
        load_optimizer_state(self.optimizer, self.model, state["optimizer"], str(file))
        self.lr_scheduler.load_state_dict(state["scheduler"])

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: fp16 is refused."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: fp16 is refused."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's state. The Trainer calls it last, right before the first batch."""
        if checkpoint is None:
            return
        state = self._rank_state(checkpoint)
        set_random_state(state["random"])
        self._tr_loss += state["loss"].to(self._tr_loss.device)
        # The mean loss of this session must not count what an earlier one had summed.
        self._total_loss_scalar -= float(state["loss"])
        self._globalstep_last_logged = state["last_logged"]
        for mode, held in state["metrics"].items():
            self._metrics[mode].update(held)
        if state["tokens"] is not None:
            self._total_train_tokens = state["tokens"]
        for callback, own in zip(self._ours(), state["statistics"], strict=True):
            callback.load_rank_state(own)

    def _rank_state(self, checkpoint: str) -> dict[str, Any]:
        """What this rank saved.

        Raises:
            CheckpointError: it was written by another number of processes.
        """
        file = Path(checkpoint) / _rank_file(self.args.process_index)
        if not file.is_file():
            raise CheckpointError(
                f"{checkpoint}: was written by fewer processes than the {self.args.world_size} of "
                "this run; resume with as many"
            )
        metadata, tensors = _read(file)
        state = unpack(json.loads(metadata["state"]), tensors)
        if state["world_size"] != self.args.world_size:
            raise CheckpointError(
                f"{checkpoint}: was written by {state['world_size']} processes and this run has "
                f"{self.args.world_size}; resume with as many"
            )
        return state

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run that was stopped between its last save and its end has nothing left to train, but
        # the Trainer would go on to the end of the epoch.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    # -- elsewhere ----------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What ``save_model`` writes, without the pickled ``training_args.bin``."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        (folder / "training_args.bin").unlink(missing_ok=True)


def find_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint under ``root`` that verifies; what is passed over is logged.

    Rank 0 looks, so that all ranks resume from the same one.
    """
    answer = b""
    if ranks.rank() == 0:
        found, problems = newest_checkpoint(root)
        for problem in problems:
            log.warning("--resume: passed over: %s", problem)
        if found is None:
            log.warning("--resume: no whole checkpoint in %s; starting from the beginning", root)
        else:
            log.info("--resume: going on from %s", found)
            answer = os.fsencode(found)
    answer = ranks.gather_bytes(answer)[0]
    return Path(os.fsdecode(answer)) if answer else None


def _rank_file(number: int) -> str:
    return f"rank-{number:05d}.safetensors"


def _read(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{file}: cannot be read ({problem})") from None
