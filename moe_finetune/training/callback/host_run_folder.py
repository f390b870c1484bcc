"""The run folder for another program's trainer, as :mod:`moe_finetune.run` writes it.

``recipe.yaml`` has what the trainer reveals. It names no data, so ``train`` does not accept it.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn
from torch.utils.data import IterableDataset

from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.saved_names import keep_names
from moe_finetune.errors import MoeFinetuneError, ObjectiveError
from moe_finetune.io import write_atomic
from moe_finetune.io.environment import write_environment
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.next_commands import program
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.lora.coverage import experts_line
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.moe.layers import backbone_of, causal_lm
from moe_finetune.recipe.data import DataSection
from moe_finetune.recipe.method import Method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import LoraSection, ModelSection
from moe_finetune.training import ranks
from moe_finetune.training.measures.routing_samples import (
    MAX_TOKENS,
    Example,
    first_rows,
    take_snapshot,
    token_inputs,
)
from moe_finetune.training.run_log import RunLog
from moe_finetune.training.save_and_resume.save_trained import (
    open_base,
    run_metadata,
    save_trained,
)
from moe_finetune.training.save_and_resume.state_files import random_state, set_random_state
from moe_finetune.training.specialization import Specialization

log = logging.getLogger(__name__)
ARGUMENTS = (
    *("num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "weight_decay"),
    *("max_grad_norm", "optim", "bf16", "gradient_checkpointing", "seed"),
)
"""The trainer's arguments that ``recipe.yaml`` has."""


class HostRun:
    """Writes a run folder while another program's trainer trains.

    It is new or empty unless the trainer resumes.
    """

    def __init__(self, output: Path, method: Method, dropout: float):
        self.output, self.method, self.dropout = output, method, dropout
        self._run = RunFolder(output)
        self.routing_file = self._run.routing_steps
        self.metadata: dict[str, Any] = {}
        self._base: Checkpoint | None = None
        self._log = RunLog(output)

    def begin(
        self,
        specialization: Specialization,
        args: Any,
        state: Any,
        events: Mapping[str, Any],
        trainer: Any,
    ) -> None:
        """Check the folder, record the routing before training, and write the run's files.

        On every rank, before the method is on the model. ``events``: what the trainer passes to
        callbacks when training begins. With ``trainer`` routing is measured on its evaluation data.
        """
        resumed = enter_folder(self.output, self._run.recipe, "a run", bool(state.global_step))
        self._recipe = recipe = self._read_recipe(specialization.model, args)
        self._base = open_base(recipe)
        self.metadata = run_metadata(recipe, self._base)
        self._tokenizer = events.get("processing_class") or load_tokenizer(recipe.model.path)
        self._data, self._rows = _sample(trainer, events.get("train_dataloader"))
        self._started = time.perf_counter()
        if args.logging_strategy == "steps" and state.logging_steps > state.max_steps:
            log.warning(
                "logging_steps is %s and training has %s steps: the run will have no curve; lower "
                "logging_steps",
                state.logging_steps,
                state.max_steps,
            )
        self._new_folder = not self.output.exists()
        ranks.barrier()  # rank 0 writes into the folder that the others look at above
        if ranks.rank() == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            write_atomic(self._run.recipe, _text(recipe, args, state.max_steps))
            write_environment(self._run.environment)
            self._run.routing.mkdir(exist_ok=True)
        before_file = self._run.routing_before
        if ranks.any_rank(ranks.rank() == 0 and not (resumed and before_file.exists())):
            self._snapshot(specialization, before_file)
        self._log.on_train_begin(args, state, None)

    def discard(self) -> None:
        """Remove what :meth:`begin` wrote when training cannot begin."""
        if ranks.rank() == 0:
            self._run.discard(self._new_folder)

    def log(self, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> None:
        """Append what the trainer logged."""
        self._log.on_log(args, state, control, logs=logs)

    def end(self, specialization: Specialization) -> None:
        """Write the routing after training and the adapter, on every rank, without the losses.

        A failure to write is only a warning, because the trainer still has to save its model.
        """
        try:
            self._snapshot(specialization, self._run.routing_after)
            model = specialization.model
            if hasattr(model, "peft_config") and _lora_config(model) is None:
                log.warning(
                    "WARNING: %s has no adapter/: the adapter is not LoRA; merge the adapter that "
                    "the trainer saves",
                    self.output,
                )
            else:
                if self._base is not None and not hasattr(model, "peft_config"):
                    keep_names(model, self._base)
                save_trained(
                    model,
                    self._tokenizer,
                    self._recipe,
                    self.output,
                    specialization.balancer,
                    self.metadata,
                    overwrite=True,  # a resumed training may have ended before, at fewer steps
                )
            if ranks.rank() == 0:
                seconds = round(time.perf_counter() - self._started, 1)
                self._run.note(seconds=seconds, trained_elsewhere=True)
                terminal().say(experts_line(model))
                report = [program(), "report", str(self.output)]
                terminal().say(f"routing: {self.output}; to draw it: {shlex.join(report)}")
        except (MoeFinetuneError, OSError) as error:
            ranks.barrier()  # where the others wait for what rank 0 writes
            log.warning("WARNING: the run in %s is incomplete: %s", self.output, error)

    def _snapshot(self, specialization: Specialization, path: Path) -> None:
        if self._rows:
            take_snapshot(
                specialization.model,
                self._rows,
                path,
                perturbation=specialization.perturbation if path.stem == "after" else None,
                tokenizer=self._tokenizer,
                data=self._data,
            )

    def _read_recipe(self, model: nn.Module, args: Any) -> Recipe:
        """A recipe that describes this training, as far as the model reveals it."""
        inner = causal_lm(model)
        name = getattr(inner.config, "_name_or_path", "") or getattr(
            backbone_of(model).config, "_name_or_path", ""
        )
        if not name:
            raise ObjectiveError(
                f"output: {self.output} could not be merged: the model does not record its "
                "checkpoint (config._name_or_path); load it with from_pretrained, or leave "
                "output out"
            )
        float32 = next(inner.parameters()).dtype == torch.float32 and not args.bf16
        adapter = _lora_config(model)
        lora = None
        if adapter is not None:
            lora = LoraSection(
                rank=adapter.r, alpha=float(adapter.lora_alpha), dropout=self.dropout
            )
        return Recipe.model_construct(
            model=ModelSection(path=str(name), dtype="float32" if float32 else "bfloat16"),
            method=self.method,
            lora=lora,
            data=DataSection(train=[]),
        )


def _text(recipe: Recipe, args: Any, max_steps: int) -> str:
    """The text of ``recipe.yaml``: only what the trainer's arguments and the model state."""
    lora = recipe.lora
    values = {name: getattr(args, name, None) for name in ARGUMENTS}
    trainer = {k: v.value if isinstance(v, Enum) else v for k, v in values.items() if v is not None}
    content = {
        "model": {"path": recipe.model.path, "dtype": recipe.model.dtype},
        "method": recipe.method.model_dump(mode="json"),
        "lora": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha},
        "trainer": {"max_steps": max_steps, **trainer},
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _lora_config(model: nn.Module) -> Any:
    config = getattr(model, "peft_config", {}).get(getattr(model, "active_adapter", None))
    return config if getattr(config, "peft_type", None) == "LORA" else None


def _sample(trainer: Any, loader: Any) -> tuple[Literal["validation", "train"], list[Example]]:
    """What rows for routing snapshots are ("validation", "train"), and their tokens."""
    collate = getattr(loader, "collate_fn", list)
    held_out = getattr(trainer, "eval_dataset", None)
    train = getattr(getattr(loader, "base_dataloader", loader), "dataset", None)
    problem = "the trainer has no dataset to read"
    kinds: tuple[tuple[Literal["validation", "train"], Any], ...]
    kinds = (("validation", held_out), ("train", train))
    for data, dataset in kinds:
        named = dataset if isinstance(dataset, Mapping) else {data: dataset}
        rows: list[Example] = []
        for name, source in named.items():
            if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
                if source is not None:
                    problem = (
                        f"the dataset is iterable ({type(source).__name__}), so rows read here "
                        "would be missing from training; give the trainer a sized eval_dataset, "
                        "and call callback.attach(trainer)"
                    )
                continue
            problem = "neither the rows nor a batch of them have 'input_ids'"
            state = random_state()  # reading must not change what training draws
            try:
                ids = _token_ids(source, collate)
                domain = ({"input_ids": row, "domain": name} for row in ids)
                rows += first_rows(domain, MAX_TOKENS // len(named))
            finally:
                set_random_state(state)
        if rows:
            if data == "train":
                log.warning("routing before and after is measured on training data")
            return data, rows
    log.warning("WARNING: routing before and after training is not written: %s", problem)
    return "train", []


def _token_ids(dataset: Any, collate: Callable[[list[Any]], Any]) -> Iterator[list[int]]:
    """The tokens of each row, or those that the trainer's collator makes from it."""
    for index in range(len(dataset)):
        row = dataset[index]
        known = isinstance(row, Mapping) and row.get("input_ids") is not None
        ids_1S = {"input_ids": torch.as_tensor(row["input_ids"]).reshape(1, -1)} if known else {}
        inputs = list(token_inputs(ids_1S or collate([row])))
        for one in inputs:
            ids_BS = one["input_ids"]
            mask_BS = one.get("attention_mask", torch.ones_like(ids_BS)).bool()
            yield from (ids[mask].tolist() for ids, mask in zip(ids_BS, mask_BS, strict=True))
        if not inputs:
            return
