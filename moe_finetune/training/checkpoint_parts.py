"""The contents of a trainer's checkpoint, and which rank writes each part.

Rank 0 writes an adapter, a whole model and small state. Each rank writes its shards of a model
without an adapter and of an optimizer's moments.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers.trainer_callback import ExportableState

from moe_finetune.errors import CheckpointError
from moe_finetune.io import write_small
from moe_finetune.training import ranks
from moe_finetune.training.checkpoint import Entry, Writer
from moe_finetune.training.full_weights import live_weights, trained_weights, whole_model
from moe_finetune.training.model_files import write_model
from moe_finetune.training.optimizer_state import optimizer_state, sharded_state, unshared
from moe_finetune.training.rank_state import pack_rank, random_state, rank_file, written_by
from moe_finetune.training.save import write_adapter
from moe_finetune.training.shards import adopt_shards, is_sharded, write_shards
from moe_finetune.training.state import TRAINER_FILE, pack

OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""Prefix of the names of tensors in shards."""


def checkpoint_parts(
    trainer: Any, target: Path, callbacks: Sequence[Any]
) -> tuple[list[Writer], dict[str, Entry]]:
    """Return functions that write the checkpoint's files, and manifest entries of its shards.

    Every rank must call this: it gathers tensors and writes shards next to ``target``.

    Raises:
        OSError: on all ranks, when one of them could not write its shard.
    """
    model = trainer.model
    adapted = getattr(model, "peft_config", None) is not None
    sharded = _writes_shards(trainer)
    weights: dict[str, Tensor] = {}
    if adapted or not sharded:
        weights = trained_weights(model) if adapted else whole_model(model)
    entries: dict[str, Entry] = {}
    staged = Path()
    if sharded:
        optimizer, moments = sharded_state(trainer.optimizer, model)
        gathered = {f"{OPTIMIZER}/{name}": tensor for name, tensor in moments.items()}
        if not adapted:
            gathered |= {
                f"{WEIGHTS}/{name}": tensor for name, tensor in live_weights(model).items()
            }
        staged, entries = write_shards(target, gathered)
    else:
        optimizer = optimizer_state(trainer.optimizer, model)
    tensors: dict[str, Tensor] = {}
    scheduler = trainer.lr_scheduler.state_dict()
    packed = pack({"optimizer": optimizer, "scheduler": scheduler}, tensors, "")
    blobs = ranks.gather_bytes(_rank_blob(trainer, callbacks))

    def write_weights(folder: Path) -> None:
        if sharded:
            adopt_shards(staged, entries, folder)
        if adapted:
            write_adapter(model.peft_config[model.active_adapter], weights, folder)
            for callback in callbacks:
                callback.describe_adapter(folder)
        elif not sharded:
            write_model(model, weights, trainer.processing_class, folder)

    def write_optimizer(folder: Path) -> None:
        metadata = {"state": json.dumps(packed)}
        save_file(unshared(tensors), folder / OPTIMIZER_FILE, metadata=metadata)

    def write_ranks(folder: Path) -> None:
        for index, blob in enumerate(blobs):
            write_small(folder, rank_file(index), blob)

    def write_trainer(folder: Path) -> None:
        _export_callbacks(trainer)
        trainer.state.save_to_json(str(folder / TRAINER_FILE))

    return [write_weights, write_optimizer, write_ranks, write_trainer], entries


def rows_of(args: Any) -> int:
    """Rows of one optimizer step, over all ranks."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def accumulation(checkpoint: Path, args: Any) -> int:
    """The accumulation that gives steps as many rows as those of ``checkpoint``.

    With as many processes as the checkpoint's run had, this is the accumulation in ``args``.

    Raises:
        CheckpointError: no accumulation gives that many rows.
    """
    world, rows = written_by(checkpoint)
    if world == args.world_size:
        return args.gradient_accumulation_steps
    rows_per_batch = args.train_batch_size * args.world_size
    if rows % rows_per_batch:
        raise CheckpointError(
            f"{checkpoint}: was written by {world} processes whose steps took {rows} rows, and "
            f"{args.world_size} of {args.train_batch_size} rows cannot continue it; resume with "
            f"{world} processes"
        )
    return rows // rows_per_batch


def check_rows(checkpoint: Path, args: Any) -> None:
    """Refuse a different number of processes if it changes the number of rows per step.

    Raises:
        CheckpointError: the size differs; the message names the accumulation that keeps it.
    """
    steps = accumulation(checkpoint, args)
    if steps != args.gradient_accumulation_steps:
        raise CheckpointError(
            f"{checkpoint}: was not written by {args.world_size} processes; set "
            f"gradient_accumulation_steps={steps} to keep the number of rows per step"
        )


def _writes_shards(trainer: Any) -> bool:
    """Whether ranks write their own shards: FSDP2, unless accelerate uses FULL_STATE_DICT."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    gathers = plugin is not None and "FULL" in str(plugin.state_dict_type)
    return is_sharded(trainer.model) and not gathers


def _rank_blob(trainer: Any, callbacks: Sequence[Any]) -> bytes:
    """State that differs between ranks: random state, sums since the last log, rollouts in use."""
    return pack_rank(
        {
            "world_size": trainer.args.world_size,
            "rows": rows_of(trainer.args),
            "random": random_state(),
            "loss": trainer._tr_loss,
            "total_loss": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
            "metrics": {k: dict(v) for k, v in getattr(trainer, "_metrics", {}).items()},
            "tokens": getattr(trainer, "_total_train_tokens", None),
            "statistics": [callback.rank_state() for callback in callbacks],
            "rollouts": trainer.rollout_state() if hasattr(trainer, "rollout_state") else None,
        }
    )


def _export_callbacks(trainer: Any) -> None:
    """Export the state of stateful callbacks (tables, biases), as the stock Trainer does."""
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            trainer.state.stateful_callbacks[type(callback).__name__] = callback.state()
