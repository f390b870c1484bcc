"""A mixin for transformers' Trainer: checkpoints that resume bit for bit, without pickle.

    class MyTrainer(ResumableTrainer, Trainer): ...

The Trainer's own saves and resumes run, with hooks for what it would pickle or not verify: weights
(a PEFT adapter, or without one an ordinary checkpoint), optimizer and scheduler, and the random
state of every rank. Every save logs first, so that no sum since the last log has to be kept. A
manifest is written last; a folder without one does not count. With FSDP2 each rank writes and reads
its own parts. See :mod:`moe_finetune.training.save_and_resume.training_state` for the folder.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import SaveStrategy

from moe_finetune.checkpoint.adapters.files import WEIGHTS as ADAPTER_FILE
from moe_finetune.errors import CheckpointError
from moe_finetune.io import clear_leftovers, write_small
from moe_finetune.io.folder import remove_folder
from moe_finetune.training import ranks
from moe_finetune.training.save_and_resume.gathered_weights import (
    like,
    live_weights,
    model_weights,
    set_weights,
    set_whole_model,
    trained_weights,
    whole_model,
)
from moe_finetune.training.save_and_resume.save_trained import write_adapter
from moe_finetune.training.save_and_resume.sharded_state import (
    WEIGHTS,
    is_sharded,
    parameters_of,
    read_moments,
    read_shards,
    sharded_moments,
    stored,
    write_shards,
)
from moe_finetune.training.save_and_resume.state_files import (
    FOLDER,
    accumulation,
    pack,
    pack_rank,
    rank_file,
    read_packed,
    read_rank,
    save_state,
    set_random_state,
    unpack,
    write_packed,
)
from moe_finetune.training.save_and_resume.training_state import (
    Entry,
    newest_checkpoint,
    rotate,
    verify_checkpoint,
    write_manifest,
)

# The other base, at run time any transformers Trainer; its attributes are used throughout.
_Trainer: Any = object
OPTIMIZER_FILE = f"{FOLDER}/optimizer.safetensors"
REFERENCE_FILE = f"{FOLDER}/reference.safetensors"
_PICKLED = "training_args.bin"
log = logging.getLogger(__name__)


class EpochSeeded(Sampler[int]):
    """A sampler whose order follows from a seed and the epoch's number alone.

    One that draws from the global generator draws at an epoch's start, whose state no checkpoint
    inside the epoch has: a resumed run would take other rows.
    """

    def __init__(self, sampler: Any, seed: int):
        self.sampler, self.seed, self.epoch = sampler, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(self.sampler)


class ResumableTrainer(_Trainer):
    """Exact, verified, pickle-free checkpoints for any Trainer. Make it the first base class."""

    _problem: Exception | None = None
    _resumed: str | None = None
    run_id: str | None = None
    """Noted in checkpoints, so that none of another run is continued."""
    _entries: dict[str, Entry]

    # -- writing ------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        best = self.args.save_strategy == SaveStrategy.BEST and self.control.should_evaluate
        if self.control.should_save or best:
            self.control.should_log = True
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        root = Path(self._get_output_dir(trial=trial))
        target = root / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._problem, self._entries = None, {}
        with self._writing():
            if self.args.should_save:
                remove_folder(target)  # a damaged one
                (target / FOLDER).mkdir(parents=True)
        ranks.barrier()
        try:
            with self._writing():
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if not ranks.any_rank(self._problem is not None) and self.args.should_save:
            with self._writing():
                write_manifest(target, self._entries, self.run_id)
                best = self.state.best_model_checkpoint
                # Only now, so that older ones stay until the new one is whole.
                rotate(root, limit, Path(best) if best else None)
        if ranks.any_rank(self._problem is not None) and self.args.should_save:
            # The run does not end: the next save may succeed.
            remove_folder(target)
            last, _ = newest_checkpoint(root)
            log.warning(
                "WARNING: %s could not be saved (%s). Training continues; the last good checkpoint "
                "is %s. Free some disk space, or raise trainer.save_steps.",
                target,
                self._problem or "see the other ranks' messages",
                last or "none; if the run stops now, it has to start from the beginning",
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Note a failed write for the end of the save: the other ranks go on to collectives."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._problem = self._problem or error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call:
            super().save_model(output_dir)
        elif not self._weights_in_shards():
            self._save_weights(Path(str(output_dir)))

    def _weights_in_shards(self) -> bool:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        gathers = plugin is not None and "FULL" in str(plugin.state_dict_type)
        return is_sharded(self.model) and not self._adapted and not gathers

    @property
    def _adapted(self) -> bool:
        return getattr(self.model, "peft_config", None) is not None

    def _save_weights(self, folder: Path) -> None:
        """Gather on all ranks, and write an adapter or an ordinary checkpoint on rank 0."""
        model = self.model
        weights = trained_weights(model) if self._adapted else whole_model(model)
        if not self.args.should_save:
            return
        with self._writing():
            if self._adapted:
                write_adapter(model.peft_config[model.active_adapter], weights, folder)
                for callback in self.callback_handler.callbacks:
                    if hasattr(callback, "describe_adapter"):
                        callback.describe_adapter(folder)
                return
            whole: Any = getattr(model, "module", model)
            whole.save_pretrained(folder, state_dict=weights)
            if hasattr(self.processing_class, "save_pretrained"):
                self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, tensors = Path(output_dir), dict[str, Tensor]()
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
        }
        packed = pack(state, tensors)
        if is_sharded(self.model):
            tensors, shards = sharded_moments(tensors, self.optimizer)
            if self._weights_in_shards():
                shards |= {f"{WEIGHTS}{n}": t for n, t in live_weights(self.model).items()}
            with self._writing():
                self._entries = write_shards(folder, shards)
        if self.args.should_save:
            with self._writing():
                write_packed(folder / OPTIMIZER_FILE, packed, tensors)
        if self._moving_reference is not None:
            reference = whole_model(self._moving_reference)
            if self.args.should_save:
                with self._writing():
                    save_state(folder / REFERENCE_FILE, reference)

    @property
    def _moving_reference(self) -> nn.Module | None:
        """The model that DPO and GRPO measure from, where it follows the policy."""
        follows = getattr(self.args, "sync_ref_model", False)
        return getattr(self, "ref_model", None) if follows else None

    def _save_rng_state(self, output_dir: str) -> None:
        tokens = getattr(self, "_total_train_tokens", None)
        files = ranks.gather_bytes(
            pack_rank(self.args, tokens=tokens, total_loss=self._total_loss_scalar)
        )
        if self.args.should_save:
            with self._writing():
                for rank, content in enumerate(files):
                    write_small(Path(output_dir), rank_file(rank), content)

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: fp16 is refused."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: TRL would write one next to the checkpoints at every save."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write what ``save_model`` writes, without the pickled arguments."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        (folder / _PICKLED).unlink(missing_ok=True)

    # -- reading ------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSeeded(sampler, seed)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint to resume from is verified first.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest that verifies
                (from the start if there is none).
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
        self._resumed = path = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if path:
            steps = accumulation(Path(path), self.args)
            if steps != self.args.gradient_accumulation_steps:
                raise CheckpointError(
                    f"{path}: was not written by {self.args.world_size} processes; set "
                    f"gradient_accumulation_steps={steps} to keep the number of rows per step"
                )
            # The random state is set twice. Here, since the loader draws the seed of its order
            # when it is made; and in _load_rng_state, right before the first new batch, since
            # making the loader, the optimizer and skipping rows have drawn from it again.
            set_random_state(self._rank_state(path)["random"])
        return super().train(path, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder, model = Path(resume_from_checkpoint), self.model if model is None else model
        if self._adapted:
            file = folder / ADAPTER_FILE
            set_weights(model, read_packed(file)[1], str(file))
        elif any(name.startswith(WEIGHTS) for name in stored(folder)):
            live = live_weights(model)
            read_shards(folder, {f"{WEIGHTS}{name}": t.detach() for name, t in live.items()})
        else:
            set_weights(model, model_weights(folder, model), str(folder))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        log.info("returning to the best checkpoint, %s (%s)", best, self.state.best_metric)
        _verify(Path(best))
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        packed, tensors = read_packed(Path(checkpoint) / OPTIMIZER_FILE)
        state = unpack(packed, {**tensors, **read_moments(Path(checkpoint), self.optimizer)})
        parameters = parameters_of(self.optimizer)
        for index, moments in state["optimizer"]["state"].items():
            for name, value in moments.items():
                whole = isinstance(value, Tensor) and not hasattr(value, "device_mesh")
                if whole and value.shape == parameters[index].shape:
                    moments[name] = like(parameters[index], value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])
        if self._moving_reference is not None:
            file = Path(checkpoint) / REFERENCE_FILE
            set_whole_model(self._moving_reference, read_packed(file)[1], str(file))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random state; the Trainer calls this right before the first batch."""
        if checkpoint is None:
            return
        state = self._rank_state(checkpoint)
        set_random_state(state["random"])
        # The checkpoint's state has the intervals of the run that wrote it.
        self.state.compute_steps(self.args, self.state.max_steps)
        self._total_loss_scalar = state["total_loss"]
        if state["tokens"] is not None:
            self._total_train_tokens = state["tokens"]

    def _rank_state(self, checkpoint: str) -> dict[str, Any]:
        return read_rank(Path(checkpoint), self.args.process_index)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: fp16 is refused."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # The Trainer divides the sum over all steps by the number of those since the resume.
        if self._initial_global_step:
            trained = max(self.state.global_step - self._initial_global_step, 0.001)
            if trained < 1 and self._resumed:  # no first batch, before which the sum is restored
                self._total_loss_scalar = self._rank_state(self._resumed)["total_loss"]
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


def find_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint under ``root`` that verifies; skipped ones are logged.

    Rank 0 decides, so all ranks resume from the same one.
    """
    newest, skipped = ranks.together(
        lambda: newest_checkpoint(root) if ranks.rank() == 0 else (None, [])
    )
    for reason in skipped:
        log.warning("--resume: skipped: %s", reason)
    if newest is not None:
        log.info("--resume: continuing from %s", newest)
    elif ranks.rank() == 0:
        log.warning("--resume: no complete checkpoint in %s; starting from the beginning", root)
    answer = ranks.gather_bytes(os.fsencode(newest) if newest else b"")[0]
    return Path(os.fsdecode(answer)) if answer else None


def _verify(folder: Path) -> None:
    """Verify a checkpoint together: each rank reads its share of the bytes."""
    share = ranks.rank(), ranks.world_size()
    ranks.together(lambda: verify_checkpoint(folder, share=share))
