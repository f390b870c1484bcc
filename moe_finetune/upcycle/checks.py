"""What can be known before anything is written, so that no expert trains for nothing."""

from __future__ import annotations

from pathlib import Path

from moe_finetune.checkpoint.opened import check_folder as check_weights
from moe_finetune.errors import CheckpointError, RecipeError, did_you_mean
from moe_finetune.models.loading import local_folder
from moe_finetune.upcycle.clustering import sizes_of
from moe_finetune.upcycle.dense import dense_facts, load_dense_config
from moe_finetune.upcycle.experts import Expert, check_alike, open_expert
from moe_finetune.upcycle.frequencies import tokenizer_hash
from moe_finetune.upcycle.judgement import check_file
from moe_finetune.upcycle.workspace import Upcycle


def check(upcycle: Upcycle) -> None:
    """Find what is wrong with texts, pins, models, table or questions.

    Raises:
        RecipeError, DataError, CheckpointError, UnsupportedModelError: see the functions called.
    """
    dense = upcycle.given_dense
    if dense is not None:
        # The whole way: config, options that a MoE has no place for, tensors and their values.
        open_expert(dense)
        check_weights(dense, load_dense_config(dense))
    _check_pins(upcycle)
    given = upcycle.recipe.experts.checkpoints
    if given is not None:
        _check_experts([local_folder(path) for path in given], dense)
    table = upcycle.recipe.clusters.table
    if table is not None and dense is not None:
        upcycle.load_table(Path(table), dense)
    judged = upcycle.recipe.evaluation.judgement
    if judged is not None and judged.file is not None:
        check_file(judged)


def _check_pins(upcycle: Upcycle) -> None:
    section, names = upcycle.recipe.clusters, list(upcycle.categories)
    if not upcycle.recipe.counts_clusters:
        return
    for name in section.pinned:
        if name not in names:
            hint = did_you_mean(name, names)
            raise RecipeError(f"clusters.pinned.{name}: no such category{hint}")
    pinned = {names.index(name): cluster for name, cluster in section.pinned.items()}
    sizes_of(len(names), section.count, pinned, bounds=section.bounds, exclusive=section.exclusive)


def _check_experts(folders: list[Path], dense: Path | None) -> None:
    experts: list[Expert] = [open_expert(folder) for folder in folders]
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
