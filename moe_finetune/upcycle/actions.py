"""The work of each step: texts, clusters, training, merging, measuring.

The first arguments identify the upcycle and the step; the last is the ledger's attempt.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.io import write_atomic
from moe_finetune.io.ledger import Attempt
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.loading import load_tokenizer, local_folder
from moe_finetune.recipe.method import resolve_method
from moe_finetune.upcycle.clustering import cluster_categories
from moe_finetune.upcycle.files import CLUSTERS_FILE, CURVES, MEASURED_FILE, TABLE_FILE
from moe_finetune.upcycle.frequencies import count_table, tokenizer_hash
from moe_finetune.upcycle.texts import SPLITS, Texts, training_texts
from moe_finetune.upcycle.workspace import Upcycle


def make_texts(upcycle: Upcycle, attempt: Attempt) -> None:
    """Write tokenizer, splits and tokenized texts; check that questions can be made from them."""
    from moe_finetune.upcycle.judgement import questions
    from moe_finetune.upcycle.tokenizer import train_tokenizer

    recipe, categories = upcycle.recipe, upcycle.categories
    section, seed = recipe.dense.pretrain, recipe.texts.seed
    if section is None:
        tokenizer = upcycle.dense_tokenizer
    else:
        tokenizer = train_tokenizer(training_texts(categories, seed), section.vocab_size)
    with _appearing(attempt) as product:
        texts = Texts.tokenize(categories, tokenizer, seed, product)
        if recipe.evaluation.judgement is not None:
            questions(tokenizer, texts, recipe.evaluation.judgement)
        tokenizer.save_pretrained(product)


def pretrain(upcycle: Upcycle, attempt: Attempt) -> None:
    """Pretrain the small dense model."""
    from moe_finetune.upcycle.dense import new_llama

    section, length = upcycle.recipe.dense.pretrain, upcycle.recipe.texts.max_length
    assert section is not None
    tokenizer = load_tokenizer(upcycle.output / "texts")
    start = attempt.work / "start"
    new_llama(section, tokenizer, length).save_pretrained(start)
    tokenizer.save_pretrained(start)
    _train(upcycle, attempt, start, section.trainer, section.seed, "dense")


def make_clusters(upcycle: Upcycle, attempt: Attempt) -> None:
    """Assign categories to clusters and count the table of token frequencies.

    A given table or the pins may decide the clusters; such a table must have these texts' counts.
    """
    section, names = upcycle.recipe.clusters, upcycle.texts.categories
    counts_CV = upcycle.texts.counts(upcycle.vocabulary)
    tokenizer, ready = upcycle.output / "texts", None
    if section.table is not None:
        ready = upcycle.load_table(Path(section.table), tokenizer)
        clusters_C = ready.assignment(names, section.pinned)
    else:
        clusters_C = cluster_categories(
            counts_CV,
            section.count,
            {names.index(name): cluster for name, cluster in section.pinned.items()},
            bounds=section.bounds,
            exclusive=section.exclusive,
            seed=section.seed,
            restarts=section.restarts,
        )
    if upcycle.recipe.experts.checkpoints is None:
        for n in range(section.count):
            members = np.flatnonzero(clusters_C == n).tolist()
            upcycle.texts.check_rows(members, upcycle.recipe.texts.max_length)
    cluster = {name: int(n) for name, n in zip(names, clusters_C, strict=True)}
    counted_with = tokenizer_hash(tokenizer)
    table = count_table(counts_CV, clusters_C, section.count, counted_with, cluster)
    if ready is not None:
        ready.check_counts(table)
    tokens = {
        name: {split: upcycle.texts.tokens(split, c) for split in SPLITS}
        for c, name in enumerate(names)
    }
    text = json.dumps({"cluster": cluster, "tokens": tokens}, indent=2, ensure_ascii=False) + "\n"
    with _appearing(attempt) as product:
        table.save(product / TABLE_FILE)
        write_atomic(product / CLUSTERS_FILE, text)


def train_expert(upcycle: Upcycle, seed: int, expert: int, attempt: Attempt) -> None:
    """Train the dense model on one cluster's texts."""
    section = upcycle.recipe.experts
    categories = np.flatnonzero(upcycle.clusters_C == expert).tolist()
    training_seed, name = 1000 * seed + 1 + expert, f"seed-{seed}.expert-{expert}"
    _train(
        upcycle,
        attempt,
        upcycle.dense,
        section.trainer,
        training_seed,
        name,
        categories,
        lora=section.lora,
    )


def train_router(upcycle: Upcycle, seed: int, attempt: Attempt) -> None:
    """Train only the routers of the merged model."""
    term = {"supervised_routing": {"table": str(upcycle.output / "clusters" / TABLE_FILE)}}
    _train(
        upcycle,
        attempt,
        upcycle.output / f"seed-{seed}" / "merged",
        upcycle.recipe.router.trainer,
        1000 * seed,
        f"seed-{seed}.router",
        # Shares need a language loss, and there is none here.
        method=resolve_method("supervised_routing", terms=term, strength={"first": False}),
        routers_only=True,
    )


def train_arm(upcycle: Upcycle, seed: int, name: str, attempt: Attempt) -> None:
    """Fine-tune one of the compared models on all texts."""
    recipe = upcycle.recipe
    arm, at = recipe.arms[name], upcycle.output / f"seed-{seed}"
    start = {"dense": upcycle.dense, "merged": at / "merged", "router": at / "router"}
    _train(
        upcycle,
        attempt,
        start[arm.start],
        recipe.trainer_of(arm),
        1000 * seed,
        f"seed-{seed}.{name}",
        method=None if arm.start == "dense" else arm.method,
        lora=recipe.finetune.lora,
        router_learning_rate=arm.router_learning_rate,
    )


def merge(upcycle: Upcycle, seed: int, attempt: Attempt) -> None:
    """Merge a seed's experts, or the recipe's ready-made ones."""
    from moe_finetune.upcycle.merge import merge_experts
    from moe_finetune.upcycle.pairing import check_pairing

    recipe = upcycle.recipe
    experts = upcycle.output / f"seed-{seed}" / "experts"
    folders = [experts / str(n) for n in range(upcycle.experts)]
    if recipe.experts.checkpoints is not None:
        folders = [local_folder(path) for path in recipe.experts.checkpoints]
        check_pairing(folders, upcycle.texts, upcycle.clusters_C, recipe.dense.dtype)
    top_k, std = recipe.merge.top_k, recipe.merge.router_std
    merge_experts(folders, attempt.target, top_k=top_k, router_std=std, seed=seed)


def measure_arm(upcycle: Upcycle, checkpoint: str, moe: bool, attempt: Attempt) -> None:
    """Measure one arm, and write its routing on test in the report's format."""
    from moe_finetune.upcycle.measure import measure

    folder = upcycle.output / checkpoint
    measured, snapshot = measure(folder, upcycle.texts, upcycle.table, upcycle.recipe, moe=moe)
    with _appearing(attempt) as product:
        write_atomic(product / MEASURED_FILE, json.dumps(measured, ensure_ascii=False) + "\n")
        if snapshot is not None:
            text = json.dumps(snapshot, ensure_ascii=False) + "\n"
            write_atomic(RunFolder(product).routing_after, text)


@contextmanager
def _appearing(attempt: Attempt) -> Iterator[Path]:
    """Yield a work folder that becomes the step's product."""
    product = attempt.work / "made"
    shutil.rmtree(product, ignore_errors=True)
    product.mkdir()
    yield product
    attempt.target.parent.mkdir(parents=True, exist_ok=True)
    product.rename(attempt.target)


def _train(
    upcycle: Upcycle,
    attempt: Attempt,
    start: Path,
    trainer: dict[str, Any],
    seed: int,
    curve: str,
    categories: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Train ``start`` on some categories (default: all); copy the log to ``curves/NAME/``."""
    from moe_finetune.upcycle.training import Job, run_job

    chosen = range(len(upcycle.texts.categories)) if categories is None else categories
    attempt.work.mkdir(parents=True, exist_ok=True)
    length, file = upcycle.recipe.texts.max_length, attempt.work / "rows.arrow"
    rows = upcycle.texts.blocks(chosen, length, seed, file)
    job = Job(start, rows, trainer, seed, upcycle.recipe.dense.dtype, **options)
    log = RunFolder(upcycle.output / CURVES / curve).metrics
    run_job(job, attempt.work, attempt.target, log)
