"""From dense to MoE, as in P3: cluster, train experts, merge, train routers, fine-tune, compare.

``texts/`` (tokenizer, split and tokenized texts) · ``dense/`` · ``clusters/`` (assignment, table) ·
``seed-S/experts/N`` · ``seed-S/merged`` · ``seed-S/router`` · ``seed-S/arms/ARM`` ·
``seed-S/measured/ARM``. Each is made once, see
:func:`~moe_finetune.upcycle.made_once.once`. Several processes may work in one folder, such as one
for each GPU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.checkpoint.open import check_folder
from moe_finetune.errors import OutputBusyError, RecipeError
from moe_finetune.io import output_folder, output_lock, write_atomic
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.hashes import KnownDigests, checkpoint_hash
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RECIPE_FILE, RunFolder
from moe_finetune.models.config_and_tokenizer import load_tokenizer, local_folder
from moe_finetune.recipe.method import resolve_method
from moe_finetune.upcycle.categories import Category, read_categories, remark_on_repetitions
from moe_finetune.upcycle.clustering import cluster_categories, sizes_of
from moe_finetune.upcycle.dense_parents import load_dense_config, new_llama
from moe_finetune.upcycle.experts import open_expert
from moe_finetune.upcycle.frequencies import FrequencyTable, count_table, tokenizer_hash
from moe_finetune.upcycle.judgement import check_answers, judge, suite_key
from moe_finetune.upcycle.made_once import once
from moe_finetune.upcycle.merge_into_moe import merge_experts
from moe_finetune.upcycle.report import write_report
from moe_finetune.upcycle.results import CLUSTERS, CURVES, MEASURED, REMEDY
from moe_finetune.upcycle.schema import ArmSection, UpcycleRecipe
from moe_finetune.upcycle.texts import (
    SPLITS,
    Texts,
    check_vocabulary,
    opening_ids,
)

log = logging.getLogger(__name__)
TABLE = "table.safetensors"
Jobs = dict[str, tuple[Mapping[str, Any], Callable[[Path, Path], object]]]
"""Products by name, each with its inputs and what makes it."""


def run_upcycle(recipe: UpcycleRecipe, output: str | Path, resume: bool = False) -> Path:
    """Carry out the recipe in ``output``, and return the report's page.

    With ``resume`` continue an earlier upcycle, or join one that is running.
    """
    output = Path(output)
    # Upcycles wait for each other; beside another verb that writes the folder one is refused.
    with output_lock(output / RECIPE_FILE, wait=True), output_lock(output):
        products = output / "made"
        resumed = enter_folder(output, products, "an upcycle", resume)
        if resume and not resumed:
            raise RecipeError(f"--resume: {output} has no upcycle run; start it without --resume")
        dense = _check_dense(recipe)
        source = dense or local_folder(recipe.dense.pretrained.tokenizer, False)
        if recipe.evaluation.suite is not None:
            check_answers(recipe.evaluation.suite, load_tokenizer(source))
        categories = read_categories(recipe.texts)
        _check(recipe, categories)
        if remark := remark_on_repetitions(categories):
            log.warning("%s", remark)
        products.mkdir(exist_ok=True)
        if not resumed:
            write_atomic(output / RECIPE_FILE, recipe.to_yaml())
    make, pretrain = partial(once, output), recipe.dense.pretrain

    # 1. Texts, split 8:1:1 by category and tokenized; a small dense model, unless one is given.
    inputs: dict[str, Any] = {
        "texts": {name: category.digest for name, category in categories.items()},
        "seed": recipe.texts.seed,
        "tokenizer": [tokenizer_hash(source), opening_ids(load_tokenizer(source))],
    }
    texts = make("texts", inputs, partial(_make_texts, recipe, categories, source))
    upcycle = Upcycle(recipe, output, dense or output / "dense")
    shared = {"dtype": recipe.dense.dtype, "length": recipe.texts.max_length, "texts": texts}
    if pretrain is not None:
        shared["dense"] = make("dense", {**shared, **pretrain.model_dump()}, upcycle.pretrain)
    else:
        digest = KnownDigests(products / "digests.json")
        shared["dense"] = checkpoint_hash(upcycle.dense, digest)
        digest.save()

    # 2. Categories in N clusters, and the table of token frequencies (section 3.1).
    inputs = {**recipe.clusters.model_dump(), **shared}
    shared["clusters"] = make("clusters", inputs, upcycle.make_clusters)
    for seed in recipe.seeds:
        folder, of_seed = f"seed-{seed}", {**shared, "seed": seed}

        # 3. The dense model trained on each cluster, and the mixture of them (section 3.2).
        inputs = {**of_seed, **recipe.experts.model_dump()}
        jobs: Jobs = {
            f"{folder}/experts/{expert}": (inputs, partial(upcycle.train_expert, seed, expert))
            for expert in range(recipe.clusters.count)
        }
        inputs = {**recipe.merge.model_dump(), "seed": seed, "experts": _divide(make, jobs)}
        starts = {"dense": shared["dense"]}
        starts["merged"] = make(f"{folder}/merged", inputs, partial(upcycle.merge, seed))

        # 4. Only the routers, on token frequencies.
        if any(arm.start == "router" for arm in recipe.arms.values()):
            inputs = {**of_seed, **recipe.router.model_dump(), "merged": starts["merged"]}
            starts["router"] = make(f"{folder}/router", inputs, partial(upcycle.train_router, seed))

        # 5. Every arm on all texts, measured.
        jobs = {
            f"{folder}/arms/{name}": (
                {
                    **of_seed,
                    **arm.model_dump(mode="json", exclude={"label", "expert_steps"}),
                    "trainer": recipe.trainer_of(arm),
                    "from": starts[arm.start],
                },
                partial(upcycle.train_arm, seed, name),
            )
            for name, arm in recipe.arms.items()
        }
        measures = _evaluation_key(recipe)
        trained = zip(recipe.arms, _divide(make, jobs), strict=True)
        jobs = {
            f"{folder}/measured/{name}": (
                {**measures, "arm": key},
                partial(upcycle.measure, seed, name),
            )
            for name, key in trained
        }
        _divide(make, jobs)
    with output_lock(RunFolder(output).page, wait=True):
        # Not earlier, because what was made with other settings is refused, and keeps its recipe.
        write_atomic(output / RECIPE_FILE, recipe.to_yaml())
        return write_report(recipe, output)


def _divide(make: Callable[..., str], jobs: Jobs) -> list[str]:
    """Make every product, first those that no other process is making; return their keys."""
    for name, (inputs, function) in jobs.items():
        with suppress(OutputBusyError):
            make(name, inputs, function, wait=False)
    return [make(name, inputs, function) for name, (inputs, function) in jobs.items()]


def _check_dense(recipe: UpcycleRecipe) -> Path | None:
    """The folder of the recipe's dense checkpoint, checked; None if the upcycle pretrains one."""
    section = recipe.dense
    if section.path is None:
        return None
    folder = local_folder(section.path, True, section.revision)
    open_expert(folder)
    config = load_dense_config(folder)
    check_folder(folder, config)
    check_vocabulary(load_tokenizer(folder), config.vocab_size, folder)
    return folder


def _check(recipe: UpcycleRecipe, categories: Mapping[str, Category]) -> None:
    """Check pins before anything is written."""
    section, names = recipe.clusters, list(categories)
    pinned = {names.index(name): cluster for name, cluster in section.pinned.items()}
    options: dict[str, Any] = {"bounds": section.sizes, "exclusive": section.exclusive}
    sizes_of(len(names), section.count, pinned, **options)


def _evaluation_key(recipe: UpcycleRecipe) -> dict[str, Any]:
    """The settings of the measurements; a suite counts by its content."""
    inputs, suite = recipe.evaluation.model_dump(), recipe.evaluation.suite
    return inputs if suite is None else {**inputs, "suite": suite_key(suite)}


def _make_texts(
    recipe: UpcycleRecipe,
    categories: dict[str, Category],
    source: Path,
    target: Path,
    scratch: Path,
) -> None:
    tokenizer = load_tokenizer(source)
    with output_folder(target, 0) as product:
        Texts.tokenize(categories, tokenizer, recipe.texts.seed, product)
        tokenizer.save_pretrained(product)


class Upcycle:
    """What makes each product, given the texts. The last arguments are those of ``once``."""

    def __init__(self, recipe: UpcycleRecipe, output: Path, dense: Path):
        self.recipe, self.output, self.dense = recipe, output, dense
        self.texts = Texts.load(output / "texts")

    def pretrain(self, target: Path, scratch: Path) -> None:
        """Pretrain the small dense model."""
        section, start = self.recipe.dense.pretrained, scratch / "start"
        tokenizer = load_tokenizer(self.output / "texts")
        new_llama(section, tokenizer, self.recipe.texts.max_length).save_pretrained(start)
        tokenizer.save_pretrained(start)
        self._train(start, section.trainer, section.seed, "dense", target, scratch)

    def make_clusters(self, target: Path, scratch: Path) -> None:
        """Assign categories to clusters and count the table of token frequencies."""
        section, names = self.recipe.clusters, self.texts.categories
        counts_CV = self.texts.counts(int(load_dense_config(self.dense).vocab_size))
        clusters_C = cluster_categories(
            counts_CV,
            section.count,
            {names.index(name): cluster for name, cluster in section.pinned.items()},
            bounds=section.sizes,
            exclusive=section.exclusive,
            seed=section.seed,
            restarts=section.restarts,
        )
        for index in range(section.count):
            members = np.flatnonzero(clusters_C == index).tolist()
            self.texts.check_rows(members, self.recipe.texts.max_length)
        cluster = {name: int(index) for name, index in zip(names, clusters_C, strict=True)}
        counted_with = tokenizer_hash(self.output / "texts")
        table = count_table(counts_CV, clusters_C, section.count, counted_with, cluster)
        tokens = {
            name: {split: self.texts.tokens(split, category) for split in SPLITS}
            for category, name in enumerate(names)
        }
        text = json.dumps({"cluster": cluster, "tokens": tokens}, indent=2, ensure_ascii=False)
        with output_folder(target, 0) as product:
            table.save(product / TABLE)
            write_atomic(product / CLUSTERS, text + "\n")

    def train_expert(self, seed: int, expert: int, target: Path, scratch: Path) -> None:
        """Train the dense model on one cluster's texts."""
        assigned = read_object(self.output / "clusters" / CLUSTERS, RecipeError, REMEDY)["cluster"]
        clusters = [assigned[name] for name in self.texts.categories]
        members = [category for category, cluster in enumerate(clusters) if cluster == expert]
        trainer, curve = self.recipe.experts.trainer, f"seed-{seed}.expert-{expert}"
        training_seed = 1000 * seed + 1 + expert
        self._train(self.dense, trainer, training_seed, curve, target, scratch, members)

    def merge(self, seed: int, target: Path, scratch: Path) -> None:
        """Feed-forwards side by side, the rest averaged, routers random (Branch-Train-MiX)."""
        section, experts = self.recipe.merge, self.output / f"seed-{seed}" / "experts"
        folders = [experts / str(expert) for expert in range(self.recipe.clusters.count)]
        options: dict[str, Any] = {"top_k": section.top_k, "router_std": section.router_std}
        merge_experts(folders, target, **options, seed=seed)

    def train_router(self, seed: int, target: Path, scratch: Path) -> None:
        """Train only the routers of the merged model."""
        term = {"supervised_routing": {"table": str(self.output / "clusters" / TABLE)}}
        # Shares need a language loss, and there is none here.
        method = resolve_method("supervised_routing", terms=term, strength={"first": False})
        trainer, curve = self.recipe.router.trainer, f"seed-{seed}.router"
        start = self.output / f"seed-{seed}" / "merged"
        options: dict[str, Any] = {"method": method, "routers_only": True}
        self._train(start, trainer, 1000 * seed, curve, target, scratch, **options)

    def train_arm(self, seed: int, name: str, target: Path, scratch: Path) -> None:
        """Fine-tune one of the compared models on all texts."""
        arm: ArmSection = self.recipe.arms[name]
        dense = arm.start == "dense"
        start = self.dense if dense else self.output / f"seed-{seed}" / arm.start
        options: dict[str, Any] = {
            "method": None if dense else arm.method,
            "router_learning_rate": arm.router_learning_rate,
        }
        trainer, curve = self.recipe.trainer_of(arm), f"seed-{seed}.{name}"
        self._train(start, trainer, 1000 * seed, curve, target, scratch, **options)

    def measure(self, seed: int, name: str, target: Path, scratch: Path) -> None:
        """Measure one arm, and write its routing on test in the report's format."""
        from moe_finetune.upcycle.measure import measure

        table = FrequencyTable.load(
            self.output / "clusters" / TABLE,
            tokenizer_hash(self.output / "texts"),
            int(load_dense_config(self.dense).vocab_size),
            self.recipe.clusters.count,
        )
        moe = self.recipe.arms[name].start != "dense"
        folder = self.output / f"seed-{seed}" / "arms" / name
        measured, snapshot = measure(folder, self.texts, table, self.recipe, moe=moe)
        if (suite := self.recipe.evaluation.suite) is not None:
            measured["scores"] = judge(folder, suite, self.recipe.dense.dtype, scratch)
        with output_folder(target, 0) as product:
            write_atomic(product / MEASURED, json.dumps(measured, ensure_ascii=False) + "\n")
            if snapshot is not None:
                text = json.dumps(snapshot, ensure_ascii=False) + "\n"
                write_atomic(RunFolder(product).routing_after, text)

    def _train(
        self,
        start: Path,
        trainer: dict[str, Any],
        seed: int,
        curve: str,
        target: Path,
        scratch: Path,
        categories: list[int] | None = None,
        **options: Any,
    ) -> None:
        """Train ``start`` on some categories (default: all); its log goes to ``curves/NAME/``."""
        from moe_finetune.upcycle.training import Job, run_job

        chosen = range(len(self.texts.categories)) if categories is None else categories
        length = self.recipe.texts.max_length
        rows = self.texts.blocks(chosen, length, seed, scratch / "rows.arrow")
        job = Job(start, rows, trainer, seed, self.recipe.dense.dtype, **options)
        run_job(job, scratch, target, RunFolder(self.output / CURVES / curve).metrics)
