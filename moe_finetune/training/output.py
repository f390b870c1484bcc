"""A run folder before training: check, create or remove it."""

import json
import logging
import shutil

from moe_finetune.errors import RecipeError
from moe_finetune.evaluation.results import step_results
from moe_finetune.io import write_atomic
from moe_finetune.io.environment import describe_environment
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.run_folder import RunFolder, missing_plugins
from moe_finetune.recipe.resume import check_resumable
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.training.checkpoint import checkpoints

log = logging.getLogger(__name__)


def check_run_folder(recipe: Recipe, run: RunFolder, resume: bool) -> None:
    """Refuse a folder with other files, or with a run of another recipe."""
    saved, output = run.recipe, run.path
    if enter_folder(output, saved, "a run", resume):
        missing = missing_plugins(run)
        if missing:
            raise RecipeError(
                f"--resume: {output} was trained with --plugin {', '.join(missing)}; give the same "
                "file again, unchanged"
            )
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


def begin_run(recipe: Recipe, run: RunFolder) -> None:
    """Create the run folder with the resolved recipe and the environment."""
    # The recipe makes the folder a resumable run, so it is written first, in one step.
    if not run.recipe.exists() or load_recipe(run.recipe).hash != recipe.hash:
        write_atomic(run.recipe, recipe.to_yaml())
    write_environment(run)


def write_environment(run: RunFolder) -> None:
    """Write the run's software versions and hardware."""
    write_atomic(run.environment, json.dumps(describe_environment(), indent=2) + "\n")


def discard(run: RunFolder, new_folder: bool) -> None:
    """Remove what a failed start wrote, unless training has written something.

    Args:
        new_folder: whether this run created the folder; it is then removed too.
    """
    products = (run.metrics, run.steps, *run.weights)
    if any(path.exists() for path in products) or checkpoints(run.checkpoints):
        return
    for folder in (run.routing, run.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (run.recipe, run.environment, run.log):
        file.unlink(missing_ok=True)
    if new_folder and not any(run.path.iterdir()):
        run.path.rmdir()
