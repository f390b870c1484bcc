"""``moe-finetune upcycle``: run all stages in order, or one of them."""

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_finetune.checkpoint.open import check_folder as check_weights
from moe_finetune.errors import CheckpointError, RecipeError, did_you_mean
from moe_finetune.io import clear_leftovers, output_lock, write_atomic
from moe_finetune.io.children import run_children
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.hashes import KnownDigests
from moe_finetune.io.json_file import read_object
from moe_finetune.io.ledger import Ledger, step_error
from moe_finetune.io.lock import helpers_only
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.loading import local_folder
from moe_finetune.upcycle.categories import remark_on_repetitions
from moe_finetune.upcycle.clustering import sizes_of
from moe_finetune.upcycle.dense import dense_facts, load_dense_config
from moe_finetune.upcycle.experts import check_alike, open_expert
from moe_finetune.upcycle.files import CLUSTERS_FILE, RECIPE_FILE, REMEDY, RESULTS_FILE, TABLES_FILE
from moe_finetune.upcycle.frequencies import tokenizer_hash
from moe_finetune.upcycle.judgement import check_file
from moe_finetune.upcycle.recipe import UpcycleRecipe
from moe_finetune.upcycle.stages import STAGES, Plan
from moe_finetune.upcycle.texts import check_vocabulary
from moe_finetune.upcycle.workspace import Upcycle

log = logging.getLogger(__name__)


def run_upcycle(
    recipe: UpcycleRecipe,
    output: str | Path,
    *,
    stage: str | None = None,
    expert: int | None = None,
    resume: bool = False,
    replace: bool = False,
) -> Path:
    """Carry out the recipe in ``output``; finished steps that are up to date are kept.

    Args:
        recipe: the validated upcycle recipe.
        output: new or empty folder, unless ``resume``.
        stage: run only this one of :data:`~moe_finetune.upcycle.stages.STAGES`.
        expert: with the stage ``experts``: train only this expert, as one of several processes.
        resume: continue in a folder with an earlier upcycle.
        replace: delete results that were trained from other inputs, and train them again.

    Returns:
        The folder, or the report's page after the stage ``evaluate``.

    Raises:
        RecipeError: the stage is unknown, or earlier stages are missing or out of date.
        OutputExistsError: the folder is not empty (without ``resume``).
        OutputBusyError: another process works in the folder; processes with ``expert`` may share
            it.
    """
    output = Path(output)
    if stage is not None and stage not in STAGES:
        raise RecipeError(f"--stage: unknown stage '{stage}'{did_you_mean(stage, STAGES)}")
    if expert is not None and (stage != "experts" or not 0 <= expert < recipe.clusters.count):
        raise RecipeError(
            f"--expert {expert}: expected 0 to {recipe.clusters.count - 1}, with --stage experts"
        )
    # Experts that outlived a killed command save their own results: wait for them.
    wait = resume and expert is None and helpers_only(output)
    if wait:
        log.warning(
            "%s: experts of an earlier command are still training; waiting for them", output
        )
    with output_lock(output, shared=expert is not None, wait=wait) as lock:
        if not enter_folder(output, output / RECIPE_FILE, "an upcycle", resume) and resume:
            raise RecipeError(f"--resume: {output} has no upcycle run; start it without --resume")
        if expert is None:
            clear_leftovers(output)
        upcycle = Upcycle(recipe, output)
        check(upcycle)
        digest = KnownDigests(output / "steps" / "digests.json")
        ledger = Ledger(output, Plan(upcycle, digest).steps(), replace=replace)
        chosen = STAGES if stage is None else (stage,)
        ledger.check_nothing_lost(
            [name for one_stage in chosen for name in ledger.of_stage(one_stage)]
        )
        if expert is None:  # otherwise another process may be writing the same
            if remark := remark_on_repetitions(upcycle.categories):
                log.warning("%s", remark)
            digest.save()
            write_atomic(output / RECIPE_FILE, recipe.to_yaml())
        started = time.perf_counter()
        for current in chosen:
            names = ledger.of_stage(current)
            if expert is not None:
                names = [name for name in names if name.endswith(f"/experts/{expert}")]
            if current == "experts" and expert is None and recipe.experts.processes > 1:
                with lock.open_to_helpers():
                    train_in_children(ledger, names, output, recipe.experts.processes)
            if stage is not None and stage != "dense" and not ledger.done("texts"):
                ledger.run("texts")
            for name in names:
                ledger.run(name)
        if stage in (None, "evaluate"):
            log.info("%s: %.0f s in all", output, time.perf_counter() - started)
            return report(recipe, upcycle, ledger)
        return output


def train_in_children(ledger: Ledger, names: Sequence[str], output: Path, processes: int) -> None:
    """Train the unfinished experts in child processes, ``processes`` at a time.

    Raises:
        StepFailedError: one failed; the others have saved their checkpoints.
        MachineError: the same, if memory, disk or a signal ended it.
        KeyboardInterrupt: a signal came; all have saved a checkpoint and ended.
    """
    numbers = sorted({int(name.rpartition("/")[2]) for name in names if not ledger.done(name)})
    command = [sys.executable, "-m", "moe_finetune.cli", "upcycle", str(output / RECIPE_FILE)]
    command += ["--output", str(output), "--resume", "--stage", "experts", "--expert"]
    if ledger.replace:
        command.insert(-1, "--replace")
    commands = {f"expert-{expert}": [*command, str(expert)] for expert in numbers}
    try:
        failure = run_children(commands, output / "logs", processes)
    except KeyboardInterrupt:
        log.warning(
            "%s: the experts saved a checkpoint and ended; to continue, repeat the command with "
            "--resume",
            output,
        )
        raise
    if failure is not None:
        fix = "free memory or disk" if failure.machine else "correct it"
        raise step_error(failure, f"; {fix} and repeat the command with --resume")


def report(recipe: UpcycleRecipe, upcycle: Upcycle, ledger: Ledger) -> Path:
    """Write ``results.json``, ``tables.md`` and ``report/index.html``; return the page."""
    from moe_finetune.io.environment import describe_environment
    from moe_finetune.io.tables import markdown
    from moe_finetune.study.render import to_markdown
    from moe_finetune.study.table import make_table
    from moe_finetune.upcycle import page, results

    output = upcycle.output
    measured = results.read_measured(recipe, output)
    clusters = read_object(output / "clusters" / CLUSTERS_FILE, RecipeError, REMEDY)
    of_splits = results.split_results(measured, recipe.seeds, output)
    of_categories = results.category_results(
        measured, recipe.seeds, output, list(clusters["cluster"])
    )
    splits, categories = make_table(of_splits), make_table(of_categories)
    cluster_rows = results.cluster_rows(clusters["cluster"], clusters["tokens"])
    summary = {
        **results.summarize(measured, splits),
        "categories": categories.to_mapping(),
        "seeds": recipe.seeds,
        "seconds": ledger.seconds(),
        "environment": describe_environment(),
    }
    write_atomic(output / RESULTS_FILE, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    tables = [
        to_markdown(splits),
        f"## Clusters (Tables 3 and 5)\n{markdown(cluster_rows)}",
        to_markdown(categories),
        "\n".join(results.NOTES) + "\n",
    ]
    write_atomic(output / TABLES_FILE, "\n".join(tables))
    arms, others = page.read_arms(recipe, output), page.read_other_trainings(recipe, output)
    html = page.render(arms, others, of_splits, splits, categories, cluster_rows)
    file = RunFolder(output).page
    write_atomic(file, html)
    return file


def check(upcycle: Upcycle) -> None:
    """Check texts, pins, models, table and questions before anything is written.

    Raises:
        RecipeError, DataError, CheckpointError, UnsupportedModelError: see the functions called.
    """
    dense = upcycle.dense_checkpoint
    if dense is not None:
        # Config, options that the MoE does not support, tensors and their values.
        open_expert(dense)
        config = load_dense_config(dense)
        check_weights(dense, config)
        check_vocabulary(upcycle.dense_tokenizer, upcycle.vocabulary, dense)
        _check_layer(upcycle.recipe.evaluation.passage_layer, config.num_hidden_layers)
    elif (section := upcycle.recipe.dense.pretrain) is not None:
        _check_layer(upcycle.recipe.evaluation.passage_layer, section.layers)
    _check_pins(upcycle)
    checkpoints = upcycle.recipe.experts.checkpoints
    if checkpoints is not None:
        _check_experts([local_folder(path) for path in checkpoints], dense)
    table = upcycle.recipe.clusters.table
    if table is not None and dense is not None:
        ready = upcycle.load_table(Path(table), dense)
        ready.assignment(list(upcycle.categories), upcycle.recipe.clusters.pinned)
    judged = upcycle.recipe.evaluation.judgement
    if judged is not None and judged.file is not None:
        check_file(judged)


def _check_layer(layer: int | None, layers: int) -> None:
    if layer is not None and layer >= layers:
        raise RecipeError(
            f"evaluation.passage_layer: {layer}; the model has {layers} layers, 0 to {layers - 1}"
        )


def _check_pins(upcycle: Upcycle) -> None:
    section, names = upcycle.recipe.clusters, list(upcycle.categories)
    if section.table is not None:
        return
    pinned = {names.index(name): cluster for name, cluster in section.pinned.items()}
    sizes_of(len(names), section.count, pinned, bounds=section.bounds, exclusive=section.exclusive)


def _check_experts(folders: list[Path], dense: Path | None) -> None:
    experts = [open_expert(folder) for folder in folders]
    for folder in folders:
        check_weights(folder, load_dense_config(folder))
    check_alike(experts)
    if dense is None:
        return
    if tokenizer_hash(folders[0]) != tokenizer_hash(dense):
        raise CheckpointError(
            f"experts.checkpoints: {folders[0]} has another tokenizer than the dense model "
            f"{dense}; give experts trained from it"
        )
    if dense_facts(folders[0]).values != dense_facts(dense).values:
        raise CheckpointError(
            f"experts.checkpoints: {folders[0]} has other sizes than the dense model {dense}; "
            "give experts trained from it"
        )
