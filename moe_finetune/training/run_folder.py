"""A run's folder before training: checked, begun, discarded; and its log, shown as it grows."""

import json
import logging
import shutil
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import TrainerCallback

from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.evaluation.results import step_results
from moe_finetune.io import write_atomic
from moe_finetune.io.environment import describe_environment, package_versions
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.hub import continue_with
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RunFolder, missing_plugins, read_log
from moe_finetune.io.terminal import curve, duration, terminal
from moe_finetune.recipe.conflicts import check_resumable
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.training.checkpoint import MANIFEST, checkpoints, written_by
from moe_finetune.training.inputs import CHECKED_LIBRARIES, note_inputs, read_inputs
from moe_finetune.training.shown import name, number, ordered
from moe_finetune.training.start import FEW_STEPS, logged_every
from moe_finetune.training.state import check_continues

log = logging.getLogger(__name__)


def check_run_folder(recipe: Recipe, run: RunFolder, resume: bool) -> None:
    """Refuse a folder with other files, or with a run of another recipe."""
    saved, output = run.recipe, run.path
    if enter_folder(output, saved, "a run", resume):
        if missing := missing_plugins(run):
            raise RecipeError(
                f"--resume: {output} was trained with --plugin {', '.join(missing)}; give the same "
                "file again, unchanged"
            )
        check_checkpoints(run)
        continue_with(read_inputs(run).get("commits", {}))
        if versions := changed_versions(run):
            log.warning("--resume: other versions than at the start of the run: %s", versions)
        changed = check_resumable(load_recipe(saved), recipe, str(saved))
        if changed:
            log.warning("--resume: changed since the start of the run: %s", ", ".join(changed))
        scored = [step for step in step_results(output) if "evaluation.every" not in changed]
        if scored and any(key.startswith("evaluation.") for key in changed):
            log.warning(
                "--resume: the scores after steps %s remain those of the earlier evaluation, "
                "because the weights of these steps no longer exist",
                ", ".join(map(str, scored)),
            )
    elif resume and output.is_dir():
        log.warning("--resume: %s is empty, so the run starts from the beginning", output)
    elif resume:
        raise RecipeError(f"--resume: {output} contains no run; start it without --resume")


def check_checkpoints(run: RunFolder) -> None:
    """Refuse checkpoints of another run: their steps are not this run's."""
    run_id = read_inputs(run).get("run")
    for folder in checkpoints(run.checkpoints):
        if run_id and written_by(folder) not in (None, run_id):
            raise CheckpointError(
                f"{folder}: was written by another run; move it out of {run.checkpoints}, and "
                "--resume continues from this run's own checkpoints"
            )
    whole = [folder for folder in checkpoints(run.checkpoints) if (folder / MANIFEST).is_file()]
    for folder in () if run.trained else whole[:1]:
        check_continues(folder)


def changed_versions(run: RunFolder) -> str:
    """Libraries that the run began with in another version, such as "torch 2.4, now 2.13"."""
    if not run.environment.is_file():
        return ""
    remedy = "delete it; it only describes the run"
    noted = read_object(run.environment, CheckpointError, remedy).get("packages")
    now = package_versions(*CHECKED_LIBRARIES)
    if not isinstance(noted, dict):
        return ""
    return ", ".join(
        f"{name} {noted[name]}, now {version}"
        for name, version in now.items()
        if noted.get(name) and noted[name] != version
    )


def begin_run(recipe: Recipe, run: RunFolder, inputs: dict[str, str] | None = None) -> None:
    """Create the run folder with the resolved recipe, the environment and the inputs' content."""
    # The recipe makes the folder a resumable run, so it is written first, in one step.
    if not run.recipe.exists() or load_recipe(run.recipe).hash != recipe.hash:
        write_atomic(run.recipe, recipe.to_yaml())
    if inputs is not None and not run.inputs.exists():
        note_inputs(run, inputs)
    write_environment(run)


def write_environment(run: RunFolder) -> None:
    """Write the run's software versions and hardware."""
    write_atomic(run.environment, json.dumps(describe_environment(), indent=2) + "\n")


def discard(run: RunFolder, new_folder: bool) -> None:
    """Remove what a failed start wrote, unless training has; the whole folder if it is new."""
    products = (run.metrics, run.steps, *run.weights)
    if any(path.exists() for path in products) or checkpoints(run.checkpoints):
        return
    for folder in (run.routing, run.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (run.recipe, run.inputs, run.environment, run.summary, run.log):
        file.unlink(missing_ok=True)
    if new_folder and not any(run.path.iterdir()):
        run.path.rmdir()


class RunLog(TrainerCallback):
    """Appends the trainer's logs, with tokens/s and a GPU's peak memory, to ``metrics.jsonl``.

    ``every_step_of_few``: log every step of a run of fewer than ``FEW_STEPS``.
    """

    def __init__(self, output: Path, every_step_of_few: bool = False):
        self.run, self.every_step_of_few = RunFolder(output), every_step_of_few
        self._tokens: float | None = 0.0
        self._time = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._time = time.perf_counter()
        self._tokens = None if state.global_step else 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if state.is_world_process_zero:
            self.run.note(max_steps=state.max_steps)
            # A run that begins again, before its first checkpoint, also repeats step 0.
            for path in (self.run.metrics, self.run.routing_steps):
                drop_after(path, state.global_step or -1)

    def on_step_end(self, args, state, control, **kwargs):
        if args.logging_strategy == "no":
            return
        short = args.logging_strategy == "steps" and args.logging_steps > state.max_steps
        due = short and not state.global_step % logged_every(state.max_steps)
        if self.every_step_of_few and args.logging_strategy == "steps":
            due = due or state.max_steps < FEW_STEPS
        if due or state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or not state.is_world_process_zero:
            return
        now, tokens = time.perf_counter(), logs.get("num_tokens")
        if "loss" in logs and tokens is not None and now > self._time:
            if self._tokens is not None and tokens > self._tokens:
                speed = (tokens - self._tokens) / (now - self._time)
                logs["tokens_per_second"] = round(speed, 1)
            self._tokens, self._time = tokens, now
        if "loss" in logs and torch.cuda.is_available():
            logs["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        evaluated = any(key.startswith("eval_") for key in logs)
        kind = "train" if "loss" in logs else "eval" if evaluated else "end"
        row = {"kind": kind, "step": state.global_step, **logs}
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")


def drop_after(path: Path, step: int) -> None:
    """Delete rows of a run's log after ``step``; a resumed run writes them again."""
    if path.exists():
        rows = [r for r in read_log(path) if r["step"] <= step and r.get("kind") != "end"]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


class LiveTable(TrainerCallback):
    """Shows losses, routing, speed and time left, where transformers prints dictionaries."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._started, self._first, self._speed = 0.0, 0, ""

    def on_train_begin(self, args, state, control, **kwargs):
        self._started, self._first = time.monotonic(), state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            parts = (f"step {state.global_step}/{state.max_steps}", *self._pace(state))
            terminal().progress(state.global_step, state.max_steps, "  ".join(parts))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or not state.is_world_process_zero or "train_runtime" in logs:
            return
        numbers = {key: float(v) for key, v in logs.items() if isinstance(v, int | float)}
        if "tokens_per_second" in numbers:
            self._speed = f"{numbers['tokens_per_second']:,.0f} tokens/s"
        selected = {key: numbers[key] for key in ordered(numbers)}
        for key, value in selected.items():
            self._values[key].append(value)
        terminal().show(self._rows())
        if selected and terminal().style != "live":
            parts = [f"{name(key)} {number(value)}" for key, value in selected.items()]
            parts += self._pace(state) if "loss" in numbers else []
            terminal().say("  ".join([f"step {state.global_step}/{state.max_steps}", *parts]))

    def on_train_end(self, args, state, control, **kwargs):
        if terminal().style == "live" and state.is_world_process_zero:
            for row in self._rows():
                terminal().say(f"  {row[0]:<28} {row[1]:>9} -> {row[2]:>9}  {row[3]}")

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (name(key), number(values[0]), number(values[-1]), curve(values))
            for key, values in self._values.items()
        ]

    def _pace(self, state) -> list[str]:
        """Tokens per second and time left, as far as they are known."""
        parts, done = [self._speed] if self._speed else [], state.global_step - self._first
        if done > 0:
            seconds = (time.monotonic() - self._started) / done
            left = round(seconds * (state.max_steps - state.global_step), 1)
            parts += [f"{duration(left)} left"] if left else []
        return parts
