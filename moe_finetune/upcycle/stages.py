"""The stages of an upcycle as steps: what each reads, and what it makes.

Folders: ``texts/`` (tokenizer, split and tokenized texts) · ``dense/`` · ``clusters/`` (assignment
and table) · ``seed-S/experts/N`` · ``seed-S/merged`` · ``seed-S/router`` · ``seed-S/arms/ARM`` ·
``seed-S/measured/ARM``. Everything below ``seed-S`` follows from that seed, the rest is shared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import CheckpointError, RecipeError, did_you_mean
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import sha256_file, sha256_json
from moe_finetune.io.json_file import read_object
from moe_finetune.models.loading import load_tokenizer, local_folder
from moe_finetune.upcycle.actions import Measure, Merge, Train
from moe_finetune.upcycle.clustering import check_pins, cluster_categories
from moe_finetune.upcycle.files import CLUSTERS_FILE, REMEDY, TABLE_FILE
from moe_finetune.upcycle.frequencies import FrequencyTable, count_table, tokenizer_hash
from moe_finetune.upcycle.ledger import Step
from moe_finetune.upcycle.recipe import UpcycleRecipe
from moe_finetune.upcycle.texts import Texts, read_categories

STAGES = ("dense", "cluster", "experts", "merge", "router", "finetune", "evaluate")


@dataclass(frozen=True)
class Upcycle:
    """The recipe at work in a folder: what every step needs of it."""

    recipe: UpcycleRecipe
    output: Path

    # -- what several steps read --------------------------------------------------------------

    @cached_property
    def categories(self) -> dict[str, list[str]]:
        """Raw texts by category."""
        return read_categories(self.recipe.texts)

    @cached_property
    def texts(self) -> Texts:
        """Tokenized texts; the step ``texts`` is done."""
        return Texts.load(self.output / "texts")

    @cached_property
    def given_dense(self) -> Path | None:
        """Folder of the recipe's dense checkpoint, if there is one."""
        section = self.recipe.dense
        return None if section.path is None else local_folder(section.path, True, section.revision)

    @property
    def dense(self) -> Path:
        """The dense checkpoint that everything starts from."""
        return self.given_dense or self.output / "dense"

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.recipe.clusters.count

    @cached_property
    def clusters_C(self) -> np.ndarray:
        """Cluster of each category; the step ``clusters`` is done."""
        held = read_object(self.output / "clusters" / CLUSTERS_FILE, RecipeError, REMEDY)
        return np.array([held["cluster"][name] for name in self.texts.categories], np.int64)

    @cached_property
    def table(self) -> FrequencyTable:
        """Token frequencies; the step ``clusters`` is done."""
        return self._load_table(self.output / "clusters" / TABLE_FILE, self.output / "texts")

    def _load_table(self, path: Path, tokenizer: Path) -> FrequencyTable:
        from moe_finetune.upcycle.dense import load_dense_config

        vocabulary = int(load_dense_config(self.dense).vocab_size)
        return FrequencyTable.load(path, tokenizer_hash(tokenizer), vocabulary, self.experts)

    def check(self) -> None:
        """Find what is wrong with pins, ready experts or a ready table before anything is written.

        Raises:
            RecipeError, DataError, CheckpointError: see the functions that are called.
        """
        from moe_finetune.checkpoint.opened import check_folder as check_weights
        from moe_finetune.upcycle.dense import load_dense_config
        from moe_finetune.upcycle.experts import check_alike, open_expert

        section, names = self.recipe.clusters, list(self.categories)
        if self.recipe.counts_clusters:
            for name in section.pinned:
                if name not in names:
                    hint = did_you_mean(name, names)
                    raise RecipeError(f"clusters.pinned.{name}: no such category{hint}")
            pinned = {names.index(name): cluster for name, cluster in section.pinned.items()}
            check_pins(len(names), section.count, pinned)
        if self.given_dense is not None:
            check_weights(self.given_dense, load_dense_config(self.given_dense))
        given = self.recipe.experts.checkpoints
        if given is not None:
            experts = [open_expert(local_folder(path)) for path in given]
            for each in experts:
                check_weights(each.folder, load_dense_config(each.folder))
            check_alike(experts)
            dense = self.given_dense
            if dense is not None and tokenizer_hash(experts[0].folder) != tokenizer_hash(dense):
                raise CheckpointError(
                    f"experts.checkpoints: {given[0]} has another tokenizer than the dense model "
                    f"{dense}; give experts trained from it"
                )
        if section.table is not None and self.given_dense is not None:
            self._load_table(Path(section.table), self.given_dense)

    # -- the steps ----------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """All steps in an order in which they can be done."""
        return [*self._shared(), *(s for seed in self.recipe.seeds for s in self._of_seed(seed))]

    def _shared(self) -> Iterator[Step]:
        recipe = self.recipe
        pretrain = recipe.dense.pretrain
        of_texts: dict[str, Any] = {
            "texts": sha256_json(self.categories),
            "seed": recipe.texts.seed,
            "tokenizer": pretrain.vocab_size
            if pretrain
            else tokenizer_hash(self.given_dense or Path()),
        }
        yield Step("texts", "dense", of_texts, (), self._make_texts)
        if pretrain is not None:
            of_dense = {
                "pretrain": pretrain.model_dump(),
                "max_length": recipe.texts.max_length,
                "dtype": recipe.dense.dtype,
            }
            yield Step("dense", "dense", of_dense, ("texts",), self._make_dense)
        clusters = recipe.clusters.model_dump()
        if recipe.clusters.table is not None:
            clusters["table"] = _file_identity(recipe.clusters.table)
        vocabulary = ("dense",) if pretrain else ()
        yield Step("clusters", "cluster", clusters, ("texts", *vocabulary), self._make_clusters)

    def _of_seed(self, seed: int) -> Iterator[Step]:
        recipe, at = self.recipe, f"seed-{seed}"
        dense: dict[str, Any] = {"dtype": recipe.dense.dtype, "length": recipe.texts.max_length}
        if self.given_dense is not None:
            dense["dense"] = folder_identity(self.given_dense)
        root = ("clusters",) if recipe.dense.pretrain is None else ("clusters", "dense")
        given = recipe.experts.checkpoints
        trained: tuple[str, ...] = ()
        if given is None:
            trained = tuple(f"{at}/experts/{n}" for n in range(self.experts))
            shared = recipe.experts.model_dump(exclude={"processes", "checkpoints"})
            for n, name in enumerate(trained):
                make = Train(self, seed, expert=n)
                yield Step(name, "experts", {**dense, **shared, "seed": seed}, root, make)
        merge: dict[str, Any] = {**recipe.merge.model_dump(), "seed": seed}
        if given is not None:
            merge["experts"] = [folder_identity(local_folder(path)) for path in given]
        yield Step(f"{at}/merged", "merge", merge, trained or root, Merge(self, seed))
        if any(arm.start == "router" for arm in recipe.arms.values()):
            yield Step(
                f"{at}/router",
                "router",
                {**dense, **recipe.router.model_dump(), "seed": seed},
                (f"{at}/merged", "clusters"),
                Train(self, seed),
            )
        for name, arm in recipe.arms.items():
            starts = {"merged": (f"{at}/merged",), "router": (f"{at}/router",), "dense": root}
            inputs = {
                **dense,
                **recipe.finetune.model_dump(),
                "arm": arm.model_dump(mode="json"),
                "seed": seed,
            }
            place = f"{at}/arms/{name}"
            yield Step(place, "finetune", inputs, starts[arm.start], Train(self, seed, arm))
            measured = recipe.evaluation.model_dump()
            judged = recipe.evaluation.judgement
            if judged is not None and judged.file is not None:
                measured["judgement"]["file"] = _file_identity(judged.file)
            measured |= {"length": recipe.texts.max_length, "dense": arm.start == "dense"}
            yield Step(
                f"{at}/measured/{name}",
                "evaluate",
                measured,
                (place, "clusters"),
                Measure(self, f"{at}/arms/{name}", arm),
            )

    # -- making the shared folders ------------------------------------------------------------

    def _make_texts(self, target: Path, work: Path) -> None:
        from moe_finetune.demo.tokenizer import train_tokenizer
        from moe_finetune.upcycle.texts import split_texts

        section = self.recipe.dense.pretrain
        seed = self.recipe.texts.seed
        if section is None:
            tokenizer = load_tokenizer(self.dense)
        else:
            parts = (split_texts(texts, seed)["train"] for texts in self.categories.values())
            tokenizer = train_tokenizer(
                (text for part in parts for text in part), section.vocab_size
            )
        made = work / "made"
        made.mkdir(exist_ok=True)
        Texts.tokenize(self.categories, tokenizer, seed).save(made)
        tokenizer.save_pretrained(made)
        made.rename(target)

    def _make_dense(self, target: Path, work: Path) -> None:
        from moe_finetune.upcycle.dense import new_llama
        from moe_finetune.upcycle.training import Job, run_job

        section = self.recipe.dense.pretrain
        assert section is not None
        length = self.recipe.texts.max_length
        tokenizer = load_tokenizer(self.output / "texts")
        start = work / "start"
        new_llama(section, tokenizer, length).save_pretrained(start)
        tokenizer.save_pretrained(start)
        everything = range(len(self.texts.categories))
        rows_RS = self.texts.blocks(everything, length, section.seed)
        job = Job(start, rows_RS, section.trainer, section.seed, self.recipe.dense.dtype)
        run_job(job, work, target)

    def _make_clusters(self, target: Path, work: Path) -> None:
        from moe_finetune.upcycle.dense import load_dense_config

        section, names = self.recipe.clusters, self.texts.categories
        vocabulary = int(load_dense_config(self.dense).vocab_size)
        counts_CV = self.texts.counts(vocabulary)
        made = work / "made"
        made.mkdir(exist_ok=True)
        clusters_C = np.arange(len(names)) % section.count
        if self.recipe.counts_clusters:
            pinned = {names.index(name): cluster for name, cluster in section.pinned.items()}
            clusters_C = cluster_categories(
                counts_CV, section.count, pinned, seed=section.seed, restarts=section.restarts
            )
        if section.table is not None:
            table = self._load_table(Path(section.table), self.output / "texts")
        else:
            digest = tokenizer_hash(self.output / "texts")
            table = count_table(counts_CV, clusters_C, section.count, digest)
        table.save(made / TABLE_FILE)
        cluster = {name: int(n) for name, n in zip(names, clusters_C, strict=True)}
        tokens = {name: int(counts.sum()) for name, counts in zip(names, counts_CV, strict=True)}
        text = json.dumps({"cluster": cluster, "train_tokens": tokens}, indent=2) + "\n"
        write_atomic(made / CLUSTERS_FILE, text)
        made.rename(target)


def folder_identity(folder: Path) -> list[Any]:
    """What stands for a checkpoint in a hash: small files by content, weights by size and time."""
    found: list[Any] = []
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        if path.suffix == ".safetensors":
            stat = path.stat()
            found.append([path.name, stat.st_size, stat.st_mtime_ns])
        elif path.suffix in (".json", ".model"):
            found.append([path.name, sha256_file(path)])
    return found


def _file_identity(path: str) -> str:
    """SHA-256 of a file's bytes, or its name where it does not exist (its step will say so)."""
    return sha256_file(Path(path)) if Path(path).is_file() else path
