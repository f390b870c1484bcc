"""The run folder for another program's trainer, as :mod:`moe_finetune.run` writes it.

``recipe.yaml`` contains what the trainer reveals: model, method, the adapter's size and the
trainer's arguments. It names no data, so commands that read runs accept it but ``train`` does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch.utils.data import IterableDataset

from moe_finetune.errors import MoeFinetuneError, ObjectiveError
from moe_finetune.io import write_atomic
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.moe.layers import backbone_of, causal_lm
from moe_finetune.recipe.data import DataSection
from moe_finetune.recipe.lora import LoraSection
from moe_finetune.recipe.method import Method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import ModelSection
from moe_finetune.training import ranks
from moe_finetune.training.output import discard, write_environment
from moe_finetune.training.rank_state import random_state, set_random_state
from moe_finetune.training.run_log import RunLog
from moe_finetune.training.sample import token_inputs
from moe_finetune.training.save import run_metadata, save_trained
from moe_finetune.training.snapshot import MAX_TOKENS, Example, first_rows, take_snapshot
from moe_finetune.training.specialization import Specialization

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)
ARGUMENTS = (
    *("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "weight_decay"),
    *("max_grad_norm", "optim", "bf16", "gradient_checkpointing", "seed"),
)


class HostRun:
    """Writes a run folder while another program's trainer trains.

    Args:
        output: a new or empty folder, unless the trainer resumes.
        dropout: LoRA dropout inside the experts.

    Raises:
        OutputExistsError: ``output`` contains other files, or a run that is not resumed.
    """

    def __init__(self, output: Path, method: Method, dropout: float):
        self.output, self.method, self.dropout = output, method, dropout
        self._run = RunFolder(output)
        self.routing_file = self._run.routing_steps
        self.metadata: dict[str, Any] = {}
        self._log = RunLog(output)
        self._recipe: Recipe | None = None
        self._rows: list[Example] = []
        self._held_out = False
        self._tokenizer: Any = None
        self._new_folder = False
        self._started = 0.0

    def begin(
        self,
        specialization: Specialization,
        args: Any,
        state: Any,
        events: Mapping[str, Any],
        trainer: Any,
    ) -> None:
        """Check the folder, record the routing before training, and write the run's files.

        Every rank must call this before the method is installed on the model.

        Args:
            events: keyword arguments that the trainer passes to callbacks when training begins.
            trainer: the trainer if known; routing is then measured on its evaluation data.
        """
        resumed = enter_folder(self.output, self._run.recipe, "a run", bool(state.global_step))
        recipe = self._recipe = self._read_recipe(specialization.model, args)
        self.metadata = run_metadata(recipe)
        self._tokenizer = events.get("processing_class") or _tokenizer_of(recipe)
        self._rows, self._held_out = _sample(trainer, events.get("train_dataloader"))
        arguments = {name: getattr(args, name, None) for name in ARGUMENTS}
        arguments["max_steps"] = state.max_steps
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
            write_atomic(self._run.recipe, _text(recipe, arguments))
            write_environment(self._run)
            self._run.routing.mkdir(exist_ok=True)
        before_file = self._run.routing_before
        if ranks.any_rank(ranks.rank() == 0 and not (resumed and before_file.exists())):
            self._snapshot(specialization, before_file)
        self._log.on_train_begin(args, state, None)

    def discard(self) -> None:
        """Remove what :meth:`begin` wrote when training cannot begin."""
        if ranks.rank() == 0:
            discard(self._run, self._new_folder)

    def log(self, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> None:
        """Append what the trainer logged."""
        self._log.on_log(args, state, control, logs=logs)

    def end(self, specialization: Specialization) -> None:
        """Write the routing after training and the adapter.

        Every rank must call this after the losses are removed. A failure to write is only a
        warning, because the trainer still has to save its model.
        """
        assert self._recipe is not None
        try:
            self._snapshot(specialization, self._run.routing_after)
            problem = _unsaved(specialization.model)
            if problem is None:
                save_trained(
                    specialization.model,
                    self._tokenizer,
                    self._recipe,
                    self.output,
                    specialization.balancer,
                    self.metadata,
                )
            else:
                log.warning("WARNING: %s has no adapter/: %s", self.output, problem)
            if ranks.rank() == 0:
                seconds = round(time.perf_counter() - self._started, 1)
                self._run.note(seconds=seconds, trained_elsewhere=True)
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
                data="validation" if self._held_out else "train",
            )

    def _read_recipe(self, model: Any, args: Any) -> Recipe:
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


def _text(recipe: Recipe, arguments: Mapping[str, Any]) -> str:
    """The text of ``recipe.yaml``: only what the trainer's arguments and the model state."""
    sections = recipe.to_mapping()
    lora = sections["lora"] and {name: sections["lora"][name] for name in ("rank", "alpha")}
    known_sections = {
        "model": {name: sections["model"][name] for name in ("path", "dtype")},
        "method": sections["method"],
        "lora": lora,
        "trainer": {
            name: value.value if isinstance(value, Enum) else value
            for name, value in arguments.items()
            if value is not None
        },
    }
    return yaml.safe_dump(known_sections, sort_keys=False, allow_unicode=True)


def _lora_config(model: Any) -> Any:
    config = getattr(model, "peft_config", {}).get(getattr(model, "active_adapter", None))
    return config if getattr(config, "peft_type", None) == "LORA" else None


def _unsaved(model: Any) -> str | None:
    """Why the trained weights cannot be written here, or None."""
    if hasattr(model, "peft_config") and _lora_config(model) is None:
        return "the adapter is not LoRA; merge the adapter that the trainer saves"
    return None


def _tokenizer_of(recipe: Recipe) -> Any:
    from moe_finetune.models.loading import load_tokenizer

    return load_tokenizer(recipe.model.path)


def _sample(trainer: Trainer | None, loader: Any) -> tuple[list[Example], bool]:
    """Rows for routing snapshots, and whether they are held out from training."""
    collate = getattr(loader, "collate_fn", None)
    held_out = getattr(trainer, "eval_dataset", None)
    sets = (held_out if isinstance(held_out, Mapping) else {"evaluation": held_out}).items()
    missing = ""
    for sources, measured in ((list(sets), True), ([("training", _dataset(loader))], False)):
        rows: list[Example] = []
        for name, dataset in sources:
            missing = _no_rows(dataset)
            if not missing:
                tokens = _token_rows(dataset, collate, name)
                rows += first_rows(tokens, MAX_TOKENS // len(sources))
        if rows:
            if not measured:
                log.warning("routing before and after is measured on training data")
            return rows, measured
    log.warning(
        "WARNING: routing before and after training is not written: %s",
        missing or "neither the rows nor a batch of them have 'input_ids'",
    )
    return [], False


def _dataset(loader: Any) -> Any:
    return getattr(getattr(loader, "base_dataloader", loader), "dataset", None)


def _no_rows(dataset: Any) -> str:
    """Why a dataset's rows cannot be read during training; empty if they can."""
    if dataset is None:
        return "the trainer has no dataset to read"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return (
            f"the dataset is iterable ({type(dataset).__name__}), so rows read here would be "
            "missing from training; give the trainer a sized eval_dataset, and call "
            "callback.attach(trainer)"
        )
    return ""


def _token_rows(dataset: Any, collate: Any, name: str) -> Iterator[Example]:
    """Rows as tokens, one at a time, without drawing from training's random state."""
    for index in range(len(dataset)):
        state = random_state()
        try:
            rows = list(_tokens(dataset[index], collate))
        finally:
            set_random_state(state)
        if not rows:
            return
        yield from ({"input_ids": row, "domain": name} for row in rows)


def _tokens(row: Any, collate: Any) -> Iterable[list[int]]:
    """The tokens of a row, or those that the trainer's collator makes from it."""
    if isinstance(row, Mapping) and row.get("input_ids") is not None:
        yield torch.as_tensor(row["input_ids"]).flatten().tolist()
        return
    if collate is None:
        return
    for inputs in token_inputs(collate([row])):
        mask = inputs.get("attention_mask")
        for index, ids in enumerate(inputs["input_ids"]):
            yield (ids if mask is None else ids[mask[index].bool()]).tolist()
