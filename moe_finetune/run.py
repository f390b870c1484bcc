"""One run, top to bottom: train -> merge -> verify -> evaluate (it, then its base) -> report.

:class:`~moe_finetune.io.run_folder.RunFolder` names the files. Finished stages are not repeated:
training has checkpoints, evaluations have results, and ``summary.json`` records a merge.
"""

from __future__ import annotations

import logging
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io import clear_leftovers, output_lock
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.io.terminal import duration, terminal
from moe_finetune.io.versions import check_versions, untested
from moe_finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.training.run.checkpoint_and_rows import Inputs

log = logging.getLogger(__name__)
EVALUATION = {"suite", "backend", "only", "limit", "data_dir", "vllm"}
"""Keys of the section that evaluations of the trained model and of its base take."""


def run_recipe(
    recipe: Recipe, output: str | Path, resume: bool = False, ignore_memory: bool = False
) -> Path:
    """Run ``recipe`` in the folder ``output`` and return the folder.

    A run that fails before its first log leaves no files: inputs are checked before the folder is
    made, and a new folder is removed again.

    Args:
        output: the run folder, new or empty unless ``resume``.
        resume: continue the run in ``output``; finished stages are kept.
        ignore_memory: start even if weights and optimizer exceed the machine's memory.

    Raises:
        OutputExistsError: ``output`` contains other files, or a run without ``resume``.
        OutputBusyError: another process is writing to ``output``.
        ConnectionError: another rank of this run has ended.
        RecipeError: ``resume`` with a recipe that trains something different from the run's.
    """
    from moe_finetune.training import ranks
    from moe_finetune.training.run.begin_run import begin_run, check_run_folder

    check_versions("a recipe")
    ranks.join_group()
    run, output, first_rank, inputs = RunFolder(output), Path(output), ranks.rank() == 0, None
    content: dict[str, str] | None = None
    with ranks.others_needed(), ranks.first_alone(partial(output_lock, output)):
        check_run_folder(recipe, run, resume)
        if not first_rank:
            terminal().quiet = True  # rank 0 speaks for all; warnings come from each
        elif output.is_dir():
            clear_leftovers(output)
        if not run.trained:
            with terminal().phase("prepare"):
                inputs, content = checked_inputs(recipe, run, resume, ignore_memory)
        ranks.barrier()  # rank 0 writes into the folder that the others look at above
        new_folder = not output.exists()
        if first_rank:
            begin_run(recipe, run, content)
        try:
            with terminal().log_to(run.log) if first_rank else nullcontext():
                stages(recipe, run, inputs, resume)
        except Exception:
            if inputs is not None and first_rank and not resume:
                run.discard(new_folder)
            if run.log.exists():
                terminal().say(f"library output: {run.log}", "warning")
            raise
    return output


def checked_inputs(
    recipe: Recipe, run: RunFolder, resume: bool, ignore_memory: bool
) -> tuple[Inputs, dict[str, str] | None]:
    """What training reads, after every check before it, and its fingerprints on the first rank.

    The fingerprints of a resumed run must be those of its start.
    """
    from moe_finetune.training import ranks
    from moe_finetune.training.before.prepare import prepare
    from moe_finetune.training.run.input_fingerprints import check_inputs, fingerprints

    inputs = prepare(recipe, ignore_memory)
    if ranks.rank() > 0:
        return inputs, None
    content = fingerprints(inputs.start)
    if content.get("data.validation") == content["data.train"]:
        terminal().say(
            "data.validation has the rows of data.train: it measures what was learned by heart, "
            "not the method; give rows that are not trained on",
            "warning",
        )
    if resume and run.recipe.exists():
        check_inputs(run, inputs.start, content)
    if not resume:
        inputs.check_disk(run)
    return inputs, content


def stages(recipe: Recipe, run: RunFolder, inputs: Inputs | None, resume: bool) -> None:
    """Train (unless done: ``inputs`` is None), merge, verify, evaluate, report.

    ``seconds`` in the summary are totals over all calls for this run.
    """
    from moe_finetune.training import ranks
    from moe_finetune.training.run.train import train

    started, phase = time.perf_counter(), terminal().phase
    # If it is not open, stages that need no base must not open it: it may be gone.
    base = None if inputs is None else inputs.start.base
    earlier_seconds = run.read_summary().get("seconds", 0.0)
    if run.finished and ranks.rank() == 0:
        run.note(finished=False)
    if inputs is not None:
        libraries = most_memory()
        if inputs.validation is not None and ranks.rank() == 0:
            run.note(validation_rows=len(inputs.validation))
        with phase("train"):
            train(recipe, run, inputs, resume)
        inputs = None
        if (peak := free_model()) and ranks.rank() == 0:
            earlier = run.read_summary()
            # The plan counts tensors alone; what the process had before is its libraries.
            most = {"peak_memory": peak, "run_memory": max(peak - libraries, 0)}
            run.note(**{name: max(earlier.get(name, 0), size) for name, size in most.items()})
    if ranks.rank() > 0:
        return
    if recipe.export.merge:
        with phase("merge"):
            merge(recipe, run, base)
    wanted = recipe.export.verify or (recipe.export.merge and untested())
    if wanted and run.adapter.exists():
        with phase("verify"):
            verify(recipe, run, base)
    if recipe.evaluation is not None:
        with phase("evaluate"):
            evaluate(recipe, run)
            evaluate_steps(recipe, run, base)
            evaluate_base(recipe, run)
    run.note(seconds=round(earlier_seconds + time.perf_counter() - started, 1))
    with phase("report"):
        from moe_finetune.report import write_report
        from moe_finetune.report.card import add_scores

        add_scores(run)
        write_report([run.path], run.page)
    run.finish()


def free_model() -> int:
    """Release the model that trained: trainer and hooks refer to it in circles.

    Returns the most bytes that this process has had; 0 on a GPU, whose memory the log has.
    """
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return 0
    return most_memory()


def most_memory() -> int:
    """The most bytes that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_run(
    recipe: Recipe, output: str | Path, resume: bool = False, ignore_memory: bool = False
) -> Inputs:
    """Check everything that :func:`run_recipe` checks before it begins, and write nothing.

    Raises:
        MoeFinetuneError: the run cannot start; names the key and the remedy.
    """
    from moe_finetune.training.run.begin_run import check_run_folder

    check_versions("a recipe")
    check_run_folder(recipe, RunFolder(output), resume)
    return checked_inputs(recipe, RunFolder(output), resume, ignore_memory)[0]


def merge(recipe: Recipe, run: RunFolder, base: Path | Checkpoint | None = None) -> None:
    """Write ``merged/``: the base with the adapter merged, under the base's tensor names.

    ``base``: the recipe's base, if already open.
    """
    from moe_finetune.checkpoint.merge import merge_adapter
    from moe_finetune.checkpoint.tokenizer_files import has_tokenizer
    from moe_finetune.training.run.checkpoint_and_rows import base_folder

    if run.merge_done:
        return
    result = merge_adapter(
        base or base_folder(recipe),
        run.adapter,
        run.merged,
        overwrite=True,
        progress=terminal().progress,
        bias=exported_bias(recipe, run),
        tokenizer="adapter" if has_tokenizer(run.adapter) else None,
    )
    log.info(
        "merged: %s, %.2f GB in %.1f s",
        result.counts(),
        result.size / 1e9,
        result.seconds,
    )
    log.debug("%s", "\n".join([*result.kinds(), *result.notes]))
    for note in result.notes:
        if note.startswith("tokenizer: "):
            log.info("%s", note)
    run.note(merge={"seconds": result.seconds})


def exported_bias(recipe: Recipe, run: RunFolder) -> dict[int, list[float]] | None:
    """The routing bias that the merged checkpoint gets, by decoder layer."""
    from moe_finetune.checkpoint.adapters.files import read_bias

    return read_bias(run.adapter) if recipe.method.export_bias == "write" else None


def verify(recipe: Recipe, run: RunFolder, base: Path | Checkpoint | None = None) -> None:
    """Compare the merged checkpoint with base + adapter; raise if they differ."""
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.checkpoint.verify import verify_merge
    from moe_finetune.training.run.checkpoint_and_rows import base_folder

    base, bias = base or base_folder(recipe), exported_bias(recipe, run)
    parts = base, run.adapter, open_checkpoint(run.merged)
    result = verify_merge(*parts, bias=bias)
    log.log(logging.WARNING if result.note else logging.INFO, "verified: %s", result.text())
    run.note(verify=asdict(result))


def evaluate(recipe: Recipe, run: RunFolder) -> None:
    """Evaluate the merged checkpoint and write ``eval/results.json``."""
    from moe_finetune.evaluation.engine import evaluate as run_suite

    section = recipe.evaluation
    assert section is not None
    options = section.model_dump(include=EVALUATION - {"suite"})
    run_suite(run.merged, section.suite, output=run.evaluation, **options)


def evaluate_base(recipe: Recipe, run: RunFolder) -> None:
    """Score the model before training into ``eval_base/``, unless another run has done it.

    It comes last, so that a run that is stopped has the scores of its own model. If the base
    cannot be scored, the run still ends with its report.
    """
    from moe_finetune.evaluation.base_scores import score_base
    from moe_finetune.evaluation.results import load_results
    from moe_finetune.training.run.checkpoint_and_rows import base_folder

    section = recipe.evaluation
    assert section is not None
    if not section.base or recipe.model.init == "random":
        return
    trained = load_results(run.results)
    if run.base_results.is_file():
        earlier = load_results(run.base_results)
        limits = [results.get("settings", {}).get("limit") for results in (earlier, trained)]
        keys = ("suite", "backend", "complete")
        if limits[0] == limits[1] and all(earlier.get(key) == trained.get(key) for key in keys):
            return
    seconds = duration(trained["wall_seconds"])
    terminal().say(f"scores of the base, to compare with; the trained model took {seconds}")
    try:
        options = section.model_dump(include=EVALUATION)
        score_base(base_folder(recipe), output=run.base_evaluation, **options)
    except MoeFinetuneError as error:
        terminal().say(
            f"the base was not scored: {error} (evaluation.base: false leaves it out)", "warning"
        )


def evaluate_steps(recipe: Recipe, run: RunFolder, base: Path | Checkpoint | None) -> None:
    """Evaluate each model saved by ``evaluation.every`` once, and delete its weights."""
    from moe_finetune.evaluation.results import step_results

    scored = step_results(run.path)
    for step, state in run.kept_steps().items():
        if state.trained and step not in scored:
            terminal().say(f"scores after step {step}")
            merge(recipe, state, base)
            evaluate(recipe, state)
        for folder in state.weights:
            shutil.rmtree(folder, ignore_errors=True)
    if lost := lost_steps(recipe, run):
        terminal().say(
            f"no scores after step {', '.join(map(str, lost))}: the model of that step could not "
            f"be kept (see {run.log}); only a new run can score it",
            "warning",
        )


def lost_steps(recipe: Recipe, run: RunFolder) -> list[int]:
    """The steps of ``evaluation.every`` whose model was not saved, for example on a full disk."""
    every_n = recipe.evaluation and recipe.evaluation.every
    rows, states = read_log(run.metrics), run.kept_steps()
    if not every_n or not rows:
        return []
    return [step for step in range(every_n, rows[-1]["step"], every_n) if step not in states]
