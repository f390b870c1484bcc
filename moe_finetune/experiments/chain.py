"""Stages in sequence: ``stages: [{stage: sft, ...}, {stage: dpo, ...}]``.

An entry of ``stages:`` has recipe keys that override the common ones. The first stage starts from
``model:``, each later one from the previous stage's merged checkpoint; common keys about the start
(``path``, ``init``, ``config``, ``revision``, ``tokenizer``, ``lora.start``) apply to the first
stage only. The output folder has a run folder for each stage, ``1-sft``, ``2-dpo``, ..., and one
``report/`` on all of them. A stage is an ordinary run that records its progress, so there is no
ledger of steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError, RecipeError
from moe_finetune.io import output_lock
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.tree import Key, Tree

STAGES_KEY = "stages"
START_KEYS = ("path", "init", "config", "revision")
"""Keys of ``model:`` that set where training starts. A later stage has none of them."""


def chain_of(tree: Tree, output: Path) -> list[tuple[Path, Recipe]]:
    """The runs of ``stages:``: the folder and the recipe of each; empty without that key.

    Raises:
        RecipeError: ``stages`` is not a list of mappings, or an entry is not a valid recipe.
    """
    if STAGES_KEY not in tree.values:
        return []
    listed = tree.values[STAGES_KEY]
    origin = tree.origin((STAGES_KEY,))
    if not isinstance(listed, list) or not listed:
        raise RecipeError(f"{origin}: stages: must be a list of mappings, such as [{{stage: sft}}]")
    runs: list[tuple[Path, Recipe]] = []
    for index, entry in enumerate(listed, 1):
        if not isinstance(entry, dict):
            raise RecipeError(f"{origin}: stages.{index - 1}: must be a mapping, not {entry!r:.60}")
        recipe = _recipe(tree, index - 1, entry, RunFolder(runs[-1][0]).merged if runs else None)
        if index < len(listed) and not recipe.export.merge:
            raise RecipeError(
                f"{origin}: stages.{index - 1}: export.merge: false leaves the next stage "
                "without a checkpoint; remove it"
            )
        runs.append((output / f"{index}-{recipe.stage}", recipe))
    return runs


def _recipe(tree: Tree, index: int, entry: dict[str, Any], start: Path | None) -> Recipe:
    """The recipe of one entry, with errors that name where it was written."""
    values = {key: value for key, value in tree.values.items() if key != STAGES_KEY}
    origins: dict[Key, str] = {}
    for key, origin in tree.origins.items():
        if key[:1] != (STAGES_KEY,):
            origins[key] = origin
    for key, origin in tree.origins.items():
        if key[:2] == (STAGES_KEY, index) and len(key) > 2:
            origins[key[2:]] = origin
    merged = Tree(values, origins)
    merged.merge(Tree(entry))
    if start is not None:
        stage_model = _mapping(entry.get("model"))
        stage_keys = {("model", name) for name in START_KEYS if name in stage_model}
        if _mapping(entry.get("lora")).get("start") is not None:
            stage_keys.add(("lora", "start"))
        for key in sorted(stage_keys):
            raise RecipeError(
                f"{merged.origin(key)}: stages.{index}: {'.'.join(key)}: a later stage starts "
                "from the previous one; remove the key"
            )
        dropped = {*START_KEYS, "tokenizer"} - stage_model.keys()
        common = _mapping(merged.values.get("model")).items()
        model = {name: value for name, value in common if name not in dropped}
        merged.values = {**merged.values, "model": {**model, "path": str(start)}}
        if lora := _mapping(merged.values.get("lora")):
            merged.values["lora"] = {name: lora[name] for name in lora if name != "start"}
    return recipe_from_tree(merged)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def describe_starts(runs: Sequence[tuple[Path, Recipe]]) -> str:
    """A line for each stage: what it starts from."""
    lines = []
    for folder, recipe in runs:
        weights = "random weights, config of " if recipe.model.init == "random" else ""
        adapter = f" with {recipe.lora.start}" if recipe.lora and recipe.lora.start else ""
        lines.append(f"{folder.name} starts from {weights}{recipe.model.path}{adapter}")
    return "\n".join(f"{'' if i else 'stages':<15}{line}" for i, line in enumerate(lines))


def check_later(runs: Sequence[tuple[Path, Recipe]], ignore_memory: bool = False) -> None:
    """Check the later stages against the first stage's model, before training begins.

    Raises:
        MoeFinetuneError: the error that a stage would raise at its start, with the stage's folder.
    """
    from moe_finetune.training.preflight import check_inputs

    start = runs[0][1].model
    for folder, recipe in runs[1:]:
        first = {key: getattr(start, key) for key in START_KEYS}
        tokenizer = recipe.model.tokenizer or start.tokenizer
        model = recipe.model.model_copy(update={**first, "tokenizer": tokenizer})
        try:
            check_inputs(recipe.model_copy(update={"model": model}), ignore_memory)
        except MoeFinetuneError as error:
            raise type(error)(f"{folder.name}: {error}") from error


def run_chain(
    output: str | Path,
    runs: Sequence[tuple[Path, Recipe]],
    resume: bool = False,
    ignore_memory: bool = False,
) -> Path:
    """Carry out ``runs`` one after another and return the page of the common report.

    Args:
        output: new or empty folder, or with ``resume`` that of an interrupted chain.
        runs: from :func:`chain_of`.
        resume: keep finished stages and resume the interrupted one from its checkpoint.
        ignore_memory: as for a single run.

    Raises:
        OutputExistsError: ``output`` is not empty (without ``resume``).
    """
    from moe_finetune.report import write_report
    from moe_finetune.run import run_recipe
    from moe_finetune.training import ranks

    output = Path(output)
    page = RunFolder(output).page
    ranks.join_group()
    with ranks.first_alone(lambda: output_lock(output)):
        first = RunFolder(runs[0][0])
        mark = RunFolder(output / first.path.name).recipe
        enter_folder(output, mark, "a chain of stages", resume)
        if not first.merged.is_dir():
            check_later(runs, ignore_memory)
        for folder, recipe in runs:
            ranks.barrier()  # every rank looks at the folder before the first one writes there
            begun = RunFolder(folder).recipe.exists()
            ranks.barrier()
            if ranks.rank() == 0:
                terminal().say(folder.name)
            run_recipe(recipe, folder, begun, ignore_memory)
        if ranks.rank() == 0:
            write_report([folder for folder, _ in runs], page)
    return page
