"""A run's folder before training: checked, and begun."""

import logging
from contextlib import suppress

from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.evaluation.results import step_results
from moe_finetune.io import write_atomic
from moe_finetune.io.environment import package_versions, write_environment
from moe_finetune.io.hub import continue_with
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RunFolder, missing_plugins
from moe_finetune.recipe.conflicts import check_resumable
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.training.run.input_fingerprints import CHECKED_LIBRARIES, note_inputs, read_inputs
from moe_finetune.training.save_and_resume.state_files import check_continues
from moe_finetune.training.save_and_resume.training_state import MANIFEST, checkpoints, written_by

log = logging.getLogger(__name__)


def check_run_folder(recipe: Recipe, run: RunFolder, resume: bool) -> None:
    """Refuse a folder with other files, or with a run of another recipe."""
    saved, output = run.recipe, run.path
    if run.has_run(resume):
        if missing := missing_plugins(run):
            raise RecipeError(
                f"--resume: {output} was trained with --plugin {', '.join(missing)}; give the same "
                "file again, unchanged"
            )
        check_checkpoints(run)
        continue_with(read_inputs(run).get("commits", {}))
        if versions := changed_versions(run):
            log.warning("--resume: other versions than at the start of the run: %s", versions)
        earlier = load_recipe(saved)
        changed = check_resumable(
            earlier,
            recipe,
            str(saved),
            by_content=read_inputs(run).get("inputs", {}),
            same_trainer=lambda name: _same_argument(run, earlier, recipe, name),
        )
        if changed:
            log.warning("--resume: changed since the start of the run: %s", ", ".join(changed))
        scored = [step for step in step_results(output) if "evaluation.every" not in changed]
        if scored and any(key.startswith("evaluation.") for key in changed):
            log.warning(
                "--resume: the scores after steps %s remain those of the earlier evaluation, "
                "because the weights of these steps no longer exist",
                ", ".join(map(str, scored)),
            )
    elif resume:
        log.warning("--resume: %s is empty, so the run starts from the beginning", output)


def _same_argument(run: RunFolder, earlier: Recipe, recipe: Recipe, name: str) -> bool:
    """Whether both recipes give the trainer the same value: one of them may write a default out."""
    from moe_finetune.training.run.trainer import training_arguments

    missing = object()
    with suppress(Exception):  # a wrong value is refused later, by its own check
        old, new = (training_arguments(one, run.path) for one in (earlier, recipe))
        return bool(getattr(old, name, missing) == getattr(new, name, None))
    return False


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
    write_environment(run.environment)
