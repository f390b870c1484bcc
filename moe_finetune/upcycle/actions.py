"""What the steps do: texts, clusters, training, merging, measuring."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.io import write_atomic
from moe_finetune.io.ledger import Attempt
from moe_finetune.models.loading import load_tokenizer, local_folder
from moe_finetune.recipe.method import resolve_method
from moe_finetune.upcycle.clustering import cluster_categories
from moe_finetune.upcycle.dense import load_dense_config
from moe_finetune.upcycle.files import CLUSTERS_FILE, CURVES, MEASURED_FILE, TABLE_FILE
from moe_finetune.upcycle.frequencies import FrequencyTable, count_table, tokenizer_hash
from moe_finetune.upcycle.recipe import ArmSection
from moe_finetune.upcycle.texts import Texts, split_texts
from moe_finetune.upcycle.workspace import Upcycle


@dataclass(frozen=True)
class MakeTexts:
    """Tokenizer, split and tokenized texts."""

    upcycle: Upcycle

    def __call__(self, attempt: Attempt) -> None:
        """Write them; the questions that are made from them are tried out."""
        from moe_finetune.demo.tokenizer import train_tokenizer
        from moe_finetune.upcycle.judgement import questions

        recipe, categories = self.upcycle.recipe, self.upcycle.categories
        section, seed = recipe.dense.pretrain, recipe.texts.seed
        if section is None:
            tokenizer = load_tokenizer(self.upcycle.dense)
        else:
            parts = (split_texts(texts, seed)["train"] for texts in categories.values())
            tokenizer = train_tokenizer(
                (text for part in parts for text in part), section.vocab_size
            )
        texts = Texts.tokenize(categories, tokenizer, seed)
        if recipe.evaluation.judgement is not None:
            questions(tokenizer, texts, recipe.evaluation.judgement)
        with _appearing(attempt) as made:
            texts.save(made)
            tokenizer.save_pretrained(made)


@dataclass(frozen=True)
class Pretrain:
    """The small dense model that is made on the spot."""

    upcycle: Upcycle

    def __call__(self, attempt: Attempt) -> None:
        from moe_finetune.upcycle.dense import new_llama

        upcycle = self.upcycle
        section, length = upcycle.recipe.dense.pretrain, upcycle.recipe.texts.max_length
        assert section is not None
        tokenizer = load_tokenizer(upcycle.output / "texts")
        start = attempt.work / "start"
        new_llama(section, tokenizer, length).save_pretrained(start)
        tokenizer.save_pretrained(start)
        _train(upcycle, attempt, start, section.trainer, section.seed, "dense")


@dataclass(frozen=True)
class MakeClusters:
    """Categories -> clusters, and the table of token frequencies."""

    upcycle: Upcycle

    def __call__(self, attempt: Attempt) -> None:
        """Cluster, count, and see that every expert has a row to train on."""
        upcycle, section = self.upcycle, self.upcycle.recipe.clusters
        names = upcycle.texts.categories
        counts_CV = upcycle.texts.counts(int(load_dense_config(upcycle.dense).vocab_size))
        clusters_C = np.arange(len(names)) % section.count
        if upcycle.recipe.counts_clusters:
            pinned = {names.index(name): cluster for name, cluster in section.pinned.items()}
            clusters_C = cluster_categories(
                counts_CV,
                section.count,
                pinned,
                bounds=section.bounds,
                exclusive=section.exclusive,
                seed=section.seed,
                restarts=section.restarts,
            )
        if upcycle.recipe.experts.checkpoints is None:
            for n in range(section.count):
                own = np.flatnonzero(clusters_C == n).tolist()
                upcycle.texts.check_rows(own, upcycle.recipe.texts.max_length)
        table = self._table(counts_CV, clusters_C)
        cluster = {name: int(n) for name, n in zip(names, clusters_C, strict=True)}
        tokens = {name: int(counts.sum()) for name, counts in zip(names, counts_CV, strict=True)}
        text = json.dumps({"cluster": cluster, "train_tokens": tokens}, indent=2) + "\n"
        with _appearing(attempt) as made:
            table.save(made / TABLE_FILE)
            write_atomic(made / CLUSTERS_FILE, text)

    def _table(self, counts_CV: np.ndarray, clusters_C: np.ndarray) -> FrequencyTable:
        ready, count = self.upcycle.recipe.clusters.table, self.upcycle.recipe.clusters.count
        if ready is not None:
            return self.upcycle.load_table(Path(ready), self.upcycle.output / "texts")
        digest = tokenizer_hash(self.upcycle.output / "texts")
        return count_table(counts_CV, clusters_C, count, digest)


@dataclass(frozen=True)
class TrainExpert:
    """The dense model trained on one cluster's texts."""

    upcycle: Upcycle
    seed: int
    expert: int

    def __call__(self, attempt: Attempt) -> None:
        upcycle, section = self.upcycle, self.upcycle.recipe.experts
        own = np.flatnonzero(upcycle.clusters_C == self.expert).tolist()
        seed = 1000 * self.seed + 1 + self.expert
        name = f"seed-{self.seed}.expert-{self.expert}"
        _train(upcycle, attempt, upcycle.dense, section.trainer, seed, name, own, lora=section.lora)


@dataclass(frozen=True)
class TrainRouter:
    """The routers of the merged model, trained alone."""

    upcycle: Upcycle
    seed: int

    def __call__(self, attempt: Attempt) -> None:
        upcycle = self.upcycle
        table = str(upcycle.output / "clusters" / TABLE_FILE)
        term = {"supervised_routing": {"table": table}}
        _train(
            upcycle,
            attempt,
            upcycle.output / f"seed-{self.seed}" / "merged",
            upcycle.recipe.router.trainer,
            1000 * self.seed,
            f"seed-{self.seed}.router",
            # There is no language loss here that a gradient could be a share of.
            method=resolve_method("supervised_routing", terms=term, strength={"first": False}),
            routers_only=True,
        )


@dataclass(frozen=True)
class TrainArm:
    """One of the models that are compared, fine-tuned on all texts."""

    upcycle: Upcycle
    seed: int
    name: str

    def __call__(self, attempt: Attempt) -> None:
        upcycle, recipe = self.upcycle, self.upcycle.recipe
        arm, at = recipe.arms[self.name], upcycle.output / f"seed-{self.seed}"
        start = {"dense": upcycle.dense, "merged": at / "merged", "router": at / "router"}
        _train(
            upcycle,
            attempt,
            start[arm.start],
            recipe.trainer_of(arm),
            1000 * self.seed,
            f"seed-{self.seed}.{self.name}",
            method=None if arm.start == "dense" else arm.method,
            lora=recipe.finetune.lora,
        )


@dataclass(frozen=True)
class Merge:
    """The step that puts the experts of a seed together."""

    upcycle: Upcycle
    seed: int

    def __call__(self, attempt: Attempt) -> None:
        """Merge this seed's experts, or the recipe's ready ones."""
        from moe_finetune.upcycle.merge import merge_experts

        recipe = self.upcycle.recipe
        experts = self.upcycle.output / f"seed-{self.seed}" / "experts"
        folders = [experts / str(n) for n in range(self.upcycle.experts)]
        if recipe.experts.checkpoints is not None:
            folders = [local_folder(path) for path in recipe.experts.checkpoints]
        section = recipe.merge
        merge_experts(
            folders,
            attempt.target,
            top_k=section.top_k,
            router_std=section.router_std,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Measure:
    """The step that measures one arm."""

    upcycle: Upcycle
    checkpoint: str
    arm: ArmSection

    def __call__(self, attempt: Attempt) -> None:
        """Measure the arm and write one file."""
        from moe_finetune.upcycle.measure import measure

        upcycle = self.upcycle
        found = measure(
            upcycle.output / self.checkpoint,
            upcycle.texts,
            upcycle.table,
            upcycle.recipe,
            moe=self.arm.start != "dense",
        )
        with _appearing(attempt) as made:
            write_atomic(made / MEASURED_FILE, json.dumps(found, ensure_ascii=False) + "\n")


@contextmanager
def _appearing(attempt: Attempt) -> Iterator[Path]:
    """A folder at work that becomes the step's product."""
    made = attempt.work / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    yield made
    attempt.target.parent.mkdir(parents=True, exist_ok=True)
    made.rename(attempt.target)


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
    """Train ``start`` on some categories (default: all) and keep the log as ``curves/NAME``."""
    from moe_finetune.upcycle.training import Job, run_job

    chosen = range(len(upcycle.texts.categories)) if categories is None else categories
    attempt.work.mkdir(parents=True, exist_ok=True)
    length, file = upcycle.recipe.texts.max_length, attempt.work / "rows.bin"
    rows_RS = upcycle.texts.blocks(chosen, length, seed, file)
    job = Job(start, rows_RS, trainer, seed, upcycle.recipe.dense.dtype, **options)
    run_job(job, attempt.work, attempt.target, upcycle.output / CURVES / f"{curve}.jsonl")
