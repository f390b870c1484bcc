"""One run, top to bottom: train -> merge -> verify -> evaluate -> report.

A run's folder holds: ``recipe.yaml`` (resolved), ``environment.json``, ``adapter/``,
``checkpoints/``, ``metrics.jsonl``, ``routing/``, ``merged/``, ``eval/results.json``,
``steps/N/eval/results.json`` with ``evaluation.every``, ``summary.json`` and ``report/index.html``;
started from the command line also ``run.log``, with what the libraries wrote.

The stages are not steps of :mod:`moe_finetune.io.ledger`: all of them follow from one recipe, whose
hash is the run's identity, their products have the places that users know, and each tells by its
product whether it is done. What goes on in the middle, training, has its own checkpoints.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import RecipeError
from moe_finetune.io import clear_leftovers, output_lock, write_atomic
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.io.terminal import terminal
from moe_finetune.io.versions import check_versions
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.preflight import Inputs, check_inputs
from moe_finetune.training.start import base_folder, second_model, start_model

if TYPE_CHECKING:
    from moe_finetune.io.worker import Worker
    from moe_finetune.training.rehearsal import Plan

log = logging.getLogger(__name__)


def run_recipe(
    recipe: Recipe,
    output: str | Path,
    resume: bool = False,
    ignore_memory: bool = False,
    worker: Worker | None = None,
    scored: bool = True,
) -> Path:
    """Carry out ``recipe`` in the folder ``output`` and return it.

    A start that fails leaves nothing behind: what can be known beforehand is checked before the
    folder is made, and the folder of a run that ends before its first log is removed again.

    Args:
        output: the run's folder; new or empty, unless ``resume``.
        resume: go on with the run in ``output`` where it stopped; finished stages are kept.
        ignore_memory: start although weights and optimizer are larger than the machine's memory.
        worker: a process that evaluates, when not this one.
        scored: evaluate and draw the page, too; else ``resume`` does it later.

    Raises:
        OutputExistsError: ``output`` holds something already (without ``resume``).
        OutputBusyError: another process is at work in ``output``.
        ConnectionError: another rank of this run has ended.
        RecipeError: ``resume`` with a recipe that trains something else than the run's.
    """
    from moe_finetune.training import ranks

    check_versions("a recipe")
    output = Path(output)
    ranks.join_group()
    with ranks.others_needed(), ranks.first_alone(lambda: output_lock(output)):
        return carry_out(recipe, output, resume, ignore_memory, worker, scored)


def carry_out(
    recipe: Recipe,
    output: Path,
    resume: bool,
    ignore_memory: bool,
    worker: Worker | None,
    scored: bool,
) -> Path:
    """What :func:`run_recipe` does while no other process may write to ``output``."""
    from moe_finetune.training import ranks

    recipe = on_day_of(recipe, output)
    check_output(recipe, output, resume)
    if ranks.rank() > 0:
        terminal().quiet = True  # rank 0 speaks for all; warnings come from each
    if ranks.rank() == 0 and output.is_dir():
        clear_leftovers(output)
    run, inputs = RunFolder(output), None
    if not run.trained:
        with terminal().phase("prepare"):
            inputs = check_inputs(recipe, ignore_memory)
        recipe = with_date(recipe, inputs.date)
    ranks.barrier()  # rank 0 writes into the folder that the others look at above
    made = not output.exists()
    if ranks.rank() == 0:
        begin(recipe, output)
    try:
        with terminal().log_to(run.log) if ranks.rank() == 0 else nullcontext():
            stages(recipe, output, inputs, resume, worker, scored)
    except Exception:
        if inputs is not None and ranks.rank() == 0 and not resume:
            discard(output, made)
        if run.log.exists():
            terminal().say(f"what the libraries printed is in {run.log}", "warning")
        raise
    return output


def stages(
    recipe: Recipe,
    output: Path,
    inputs: Inputs | None,
    resume: bool,
    worker: Worker | None,
    scored: bool,
) -> None:
    """Train (unless ``inputs`` is None: it is done), merge, verify; if ``scored`` evaluate, report.

    ``seconds`` in the summary are those of all calls for this run.
    """
    from moe_finetune.training import ranks

    started, phase = time.perf_counter(), terminal().phase
    before = RunFolder(output).read_summary().get("seconds", 0.0)
    if inputs is not None:
        with phase("train"):
            train(recipe, output, inputs, resume)
    if ranks.rank() > 0:
        return
    if recipe.export.merge:
        with phase("merge"):
            merge(recipe, output)
    if recipe.export.verify and RunFolder(output).adapter.exists():
        with phase("verify"):
            verify(recipe, output)
    if scored and recipe.evaluation is not None:
        with phase("evaluate"):
            evaluate(recipe, output, worker)
            evaluate_steps(recipe, output, worker)
    RunFolder(output).note(seconds=round(before + time.perf_counter() - started, 1))
    if scored:
        with phase("report"):
            report(output)


def plan_run(
    recipe: Recipe, output: str | Path, resume: bool = False, ignore_memory: bool = False
) -> Plan:
    """Check everything that :func:`run_recipe` checks before it begins, and write nothing.

    Raises:
        MoeFinetuneError: what would end the start, with the key and what to do.
    """
    check_versions("a recipe")
    recipe = on_day_of(recipe, Path(output))
    check_output(recipe, Path(output), resume)
    return check_inputs(recipe, ignore_memory, activations=True).plan


def check_output(recipe: Recipe, output: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, or a run that another recipe trained."""
    from moe_finetune.evaluation.steps import step_results
    from moe_finetune.recipe.resume import check_resumable
    from moe_finetune.recipe.schema import load_recipe

    saved = RunFolder(output).recipe
    if enter_folder(output, saved, "a run", resume):
        changed = check_resumable(load_recipe(saved), recipe, str(saved))
        if changed:
            log.warning("--resume: changed since the run was started: %s", ", ".join(changed))
        kept = [step for step in step_results(output) if "evaluation.every" not in changed]
        if kept and any(key.startswith("evaluation.") for key in changed):
            log.warning(
                "--resume: the scores after steps %s stay those of the earlier evaluation: the "
                "weights of these steps are gone",
                ", ".join(map(str, kept)),
            )
    elif resume and output.is_dir():
        log.warning("--resume: %s is empty, so the run starts at its beginning", output)
    elif resume:
        raise RecipeError(f"--resume: {output} holds no run; start it without --resume")


def on_day_of(recipe: Recipe, output: Path) -> Recipe:
    """``recipe`` with the date of the run in ``output``, which its chat template wrote."""
    from moe_finetune.recipe.schema import load_recipe

    saved = RunFolder(output).recipe
    if recipe.data.date is not None or not saved.is_file():
        return recipe
    return with_date(recipe, load_recipe(saved).data.date)


def with_date(recipe: Recipe, date: str | None) -> Recipe:
    """``recipe`` with the day (ISO) that its chat template writes, if it writes one."""
    data = recipe.data.model_copy(update={"date": date or recipe.data.date})
    return recipe.model_copy(update={"data": data})


def begin(recipe: Recipe, output: Path) -> None:
    """Make the run's folder, with the resolved recipe and the environment in it."""
    from moe_finetune.io.environment import describe_environment
    from moe_finetune.recipe.schema import load_recipe
    from moe_finetune.training.run_log import noted_weights, with_weights

    # The recipe makes the folder a run that can be resumed, so it comes first, and whole.
    saved = RunFolder(output).recipe
    if not saved.exists():
        write_atomic(saved, recipe.to_yaml())
    elif load_recipe(saved).hash != recipe.hash:
        write_atomic(saved, with_weights(recipe, noted_weights(saved)).to_yaml())
    environment = json.dumps(describe_environment(), indent=2) + "\n"
    write_atomic(RunFolder(output).environment, environment)


def discard(output: Path, whole: bool) -> None:
    """Remove what a failed start wrote, unless something of a training is there.

    Args:
        whole: the run made the folder itself.
    """
    from moe_finetune.training.checkpoint import checkpoints

    run = RunFolder(output)
    products = (run.metrics, run.bad_batches, run.steps, *run.weights)
    if any(path.exists() for path in products) or checkpoints(run.checkpoints):
        return
    for folder in (run.routing, run.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (run.recipe, run.environment, run.log):
        file.unlink(missing_ok=True)
    if whole and not any(output.iterdir()):
        output.rmdir()


def train(recipe: Recipe, output: Path, inputs: Inputs, resume: bool = False) -> None:
    """Fine-tune and leave the adapter (or, without LoRA, the model) in the run's folder."""
    from transformers import set_seed

    from moe_finetune.lora.coverage import lora_coverage
    from moe_finetune.lora.targets import adapts, add_lora
    from moe_finetune.moe.offload import offload_experts
    from moe_finetune.recipe.stages import STAGES
    from moe_finetune.training import ranks
    from moe_finetune.training.continued import continue_adapter
    from moe_finetune.training.drift import watch_drift
    from moe_finetune.training.keep_steps import KeepSteps
    from moe_finetune.training.numerics import make_deterministic
    from moe_finetune.training.resumable import find_checkpoint
    from moe_finetune.training.save import name_base, run_metadata, save_trained
    from moe_finetune.training.signals import StopOnSignal
    from moe_finetune.training.snapshot import sample_examples, take_snapshot
    from moe_finetune.training.trainer import build_trainer

    if recipe.numerics.deterministic:
        make_deterministic()
    start = inputs.start
    model: Any = start_model(start)
    set_seed(recipe.seed)
    model = add_lora(model, recipe.lora, recipe.router.train)
    if recipe.lora is not None and recipe.lora.start is not None and start.checkpoint is not None:
        continue_adapter(model, Path(recipe.lora.start), start.checkpoint)
    if recipe.model.offload == "experts":
        offload_experts(model)
    log.debug("LoRA coverage\n%s", lora_coverage(model).table())
    checkpoint = find_checkpoint(RunFolder(output).checkpoints) if resume else None
    trainer, callback = build_trainer(
        recipe,
        output,
        model,
        inputs.rendering,
        inputs.train,
        inputs.validation,
        functools.partial(second_model, start),
        checkpoint,
    )
    if adapts(recipe.lora, recipe.router.train):
        name_base(model, recipe)  # checkpoints name it, too
        callback.run_metadata = run_metadata(recipe, start.checkpoint)
    held_out = inputs.validation is not None
    if not held_out:
        log.warning(
            "data.validation is not set: routing before and after is measured on training data"
        )
    sample = sample_examples(inputs.sources, recipe.data.max_length)
    take = functools.partial(
        take_snapshot,
        model,
        sample,
        tokenizer=start.tokenizer,
        data="validation" if held_out else "train",
    )
    before = RunFolder(output).routing_before
    if ranks.any_rank(ranks.rank() == 0 and not before.exists()):
        take(before)  # of all ranks, since experts may be spread over them
    if STAGES[recipe.stage].form != "tokens":
        watch_drift(trainer, callback, sample)
    trainer.add_callback(KeepSteps(recipe, output, model, start.tokenizer, callback))
    if checkpoint:
        trainer.args.eval_on_start = False
    with StopOnSignal(output) as stop:
        trainer.add_callback(stop)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            callback.close()
    method = callback.specialization
    assert method is not None
    take(RunFolder(output).routing_after, perturbation=method.perturbation)
    save_trained(model, start.tokenizer, recipe, output, method.balancer, callback.run_metadata)


def merge(recipe: Recipe, output: Path) -> None:
    """Write ``merged/``: the base with the adapter in it, under the base's tensor names."""
    from moe_finetune.checkpoint import merge_adapter

    run = RunFolder(output)
    if run.merge_done:
        return
    base = base_folder(recipe)
    result = merge_adapter(
        base,
        run.adapter,
        run.merged,
        overwrite=True,
        progress=terminal().progress,
        bias=exported_bias(recipe, output),
    )
    log.info(
        "merged: %d tensors changed, %d copied, %.2f GB in %.1f s",
        result.changed,
        result.copied,
        result.bytes_written / 1e9,
        result.seconds,
    )
    log.debug("%s", "\n".join([*result.plan.kinds(), *result.plan.notes]))
    run.note(merge={"expert_delta_norms": result.expert_norms, "seconds": result.seconds})


def exported_bias(recipe: Recipe, output: Path) -> dict[int, list[float]] | None:
    """The routing bias that the merged checkpoint gets, by decoder layer."""
    from moe_finetune.checkpoint.adapter import read_bias

    return read_bias(RunFolder(output).adapter) if recipe.method.export_bias == "write" else None


def verify(recipe: Recipe, output: Path) -> None:
    """Compare the merged checkpoint with base + adapter; raise when they differ."""
    from moe_finetune.checkpoint.verify import verify_merge
    from moe_finetune.checkpoint.verify_quantized import verify_quantized

    run, base, bias = RunFolder(output), base_folder(recipe), exported_bias(recipe, output)
    result = verify_merge(base, run.adapter, run.merged, bias=bias)
    log.info(
        "verified: %s of merged and base + adapter differ by %.1e (allowed %.0e)",
        result.mode,
        result.max_rel,
        result.tolerance,
    )
    found: dict[str, Any] = {
        "mode": result.mode,
        "max_rel": result.max_rel,
        "tolerance": result.tolerance,
    }
    quantized = verify_quantized(base, run.adapter, run.merged, bias)
    if quantized is not None:
        log.info("verified: %s", quantized.text())
        found |= {"quantized": asdict(quantized)}
    run.note(verify=found)


def evaluate(recipe: Recipe, output: Path, worker: Worker | None = None) -> None:
    """Evaluate the merged checkpoint and write ``eval/results.json``."""
    from moe_finetune.evaluation.engine import evaluate as run_suite

    section = recipe.evaluation
    assert section is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        if worker is None:
            return run_suite(*args, **kwargs)
        return worker.call(run_suite, *args, **kwargs)

    call(
        RunFolder(output).merged,
        section.suite,
        backend=section.backend,
        output=RunFolder(output).evaluation,
        vllm=section.vllm,
        limit=section.limit,
        data_dir=section.data_dir,
        only=section.only,
    )


def evaluate_steps(recipe: Recipe, output: Path, worker: Worker | None = None) -> None:
    """Evaluate the states that training kept on its way, each once, and delete their weights."""
    from moe_finetune.evaluation.steps import step_results

    scored = step_results(output)
    for step, state in RunFolder(output).kept_steps().items():
        if state.trained and step not in scored:
            terminal().say(f"scores after step {step}")
            merge(recipe, state.path)
            evaluate(recipe, state.path, worker)
        for folder in state.weights:
            shutil.rmtree(folder, ignore_errors=True)
    if lost := lost_steps(recipe, output):
        terminal().say(
            f"no scores after step {', '.join(map(str, lost))}: the model could not be kept there "
            f"(see {RunFolder(output).log}); only a new run can score it",
            "warning",
        )


def lost_steps(recipe: Recipe, output: Path) -> list[int]:
    """The steps of ``evaluation.every`` whose model was not kept: on a full disk, for example."""
    section = recipe.evaluation
    if section is None or section.every is None:
        return []
    rows, kept = read_log(RunFolder(output).metrics), RunFolder(output).kept_steps()
    last = rows[-1]["step"] if rows else 0
    due = range(section.every, last, section.every)
    return [step for step in due if step not in kept]


def report(output: Path) -> Path:
    """Draw ``report/index.html`` from what the run's folder holds."""
    from moe_finetune.report import write_report

    return write_report([output], RunFolder(output).page)
