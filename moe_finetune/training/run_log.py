"""Files that a run writes during training: its log, and the weights found for shares."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import TrainerCallback

from moe_finetune.io import write_atomic
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.tree import load_tree
from moe_finetune.training.specialization import Specialization

LOGS_OF_A_SHORT_RUN = 10


def logged_every(max_steps: int) -> int:
    """Steps between logs of a run shorter than its ``logging_steps``."""
    return max(1, max_steps // LOGS_OF_A_SHORT_RUN)


class RunLog(TrainerCallback):
    """Appends the trainer's logs, with tokens/s, to ``metrics.jsonl``.

    On a GPU, training rows also have ``peak_memory_gib``: the peak memory of tensors on rank 0's
    device since training began.
    """

    def __init__(self, output: Path):
        self.run = RunFolder(output)
        self.path = self.run.metrics
        self._tokens: float | None = 0.0
        self._time = 0.0
        self.tokens_per_second: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._time = time.perf_counter()
        self._tokens = None if state.global_step else 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if state.is_world_process_zero:
            for path in (self.run.metrics, self.run.routing_steps):
                drop_after(path, state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if args.logging_strategy == "no":
            return
        short = args.logging_strategy == "steps" and args.logging_steps > state.max_steps
        due = short and not state.global_step % logged_every(state.max_steps)
        if due or state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or not state.is_world_process_zero:
            return
        now = time.perf_counter()
        tokens = logs.get("num_tokens")
        if "loss" in logs and tokens is not None and now > self._time:
            if self._tokens is not None and tokens > self._tokens:
                self.tokens_per_second = (tokens - self._tokens) / (now - self._time)
                logs["tokens_per_second"] = round(self.tokens_per_second, 1)
            self._tokens, self._time = tokens, now
        if "loss" in logs and torch.cuda.is_available():
            logs["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        evaluated = any(name.startswith("eval_") for name in logs)
        kind = "train" if "loss" in logs else "eval" if evaluated else "end"
        row = {"kind": kind, "step": state.global_step, **logs}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")


def drop_after(path: Path, step: int) -> None:
    """Delete rows of a run's log after ``step``; a resumed run writes them again."""
    if path.exists():
        rows = [r for r in read_log(path) if r["step"] <= step and r.get("kind") != "end"]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


class FoundWeights(TrainerCallback):
    """Writes the weights found for shares into the run's resolved recipe.

    The recipe still equals the original: next to a share, a weight is only a record.

    Args:
        path: the resolved recipe; nothing is written until it exists.
        at_work: returns the installed method once training has begun.
        text: the recipe's text with these weights, by term.
    """

    def __init__(
        self,
        path: Path,
        at_work: Callable[[], Specialization | None],
        text: Callable[[dict[str, float]], str],
    ):
        self.path, self.at_work, self.text = path, at_work, text
        self._written: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs):
        specialization = self.at_work()
        if specialization is None or not state.is_world_process_zero or not self.path.exists():
            return
        weights = {
            term.name: weight
            for term in specialization.objective.terms
            if term.options.finds_weight
            and (weight := specialization.objective.full_weights[term.name]) is not None
        }
        if weights != self._written:
            self._written = weights
            write_atomic(self.path, self.text(weights))


def with_weights(recipe: Recipe, weights: dict[str, float]) -> Recipe:
    """``recipe`` with each found weight next to its share."""
    terms = {
        name: options.model_copy(update={"weight": weights[name]}) if name in weights else options
        for name, options in recipe.method.terms.items()
    }
    method = recipe.method.model_copy(update={"terms": terms})
    return recipe.model_copy(update={"method": method})


def noted_weights(path: Path) -> dict[str, float]:
    """The weights that :class:`FoundWeights` recorded in a run's recipe, by term."""
    terms = load_tree([path]).values["method"]["terms"]
    return {
        name: options["weight"]
        for name, options in terms.items()
        if (options.get("share") or options.get("target")) and options.get("weight")
    }
