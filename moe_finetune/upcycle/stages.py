"""The stages of an upcycle as steps, with their inputs and products.

Folders: ``texts/`` (tokenizer, split and tokenized texts) · ``dense/`` · ``clusters/`` (assignment
and table) · ``seed-S/experts/N`` · ``seed-S/merged`` · ``seed-S/router`` · ``seed-S/arms/ARM`` ·
``seed-S/measured/ARM``. Everything below ``seed-S`` depends on that seed; the rest is shared.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from moe_finetune.io.hashes import KnownDigests, checkpoint_hash
from moe_finetune.io.ledger import Step
from moe_finetune.models.loading import local_folder
from moe_finetune.upcycle import actions
from moe_finetune.upcycle.frequencies import tokenizer_hash
from moe_finetune.upcycle.texts import opening_ids
from moe_finetune.upcycle.workspace import Upcycle

MEASURED_FORMAT = 5
STAGES = ("dense", "cluster", "experts", "merge", "router", "finetune", "evaluate")


class Plan:
    """The steps of an upcycle, each with the inputs it depends on.

    Files are identified by content: a copy or another modification time changes nothing.

    Args:
        upcycle: the recipe and its folder.
        digest: hashes one file.
    """

    def __init__(self, upcycle: Upcycle, digest: KnownDigests):
        self.upcycle, self.recipe, self.digest = upcycle, upcycle.recipe, digest

    def steps(self) -> list[Step]:
        return [*self._shared(), *(s for seed in self.recipe.seeds for s in self._of_seed(seed))]

    @cached_property
    def _dense(self) -> dict[str, Any]:
        """Inputs of every training, in addition to its own section."""
        recipe = self.recipe
        inputs: dict[str, Any] = {"dtype": recipe.dense.dtype, "length": recipe.texts.max_length}
        if self.upcycle.dense_checkpoint is not None:
            inputs["dense"] = checkpoint_hash(self.upcycle.dense_checkpoint, self.digest)
        return inputs

    @property
    def _root(self) -> tuple[str, ...]:
        return ("clusters",) if self.recipe.dense.pretrain is None else ("clusters", "dense")

    def _shared(self) -> Iterator[Step]:
        recipe, upcycle = self.recipe, self.upcycle
        pretrain = recipe.dense.pretrain
        of_texts: dict[str, Any] = {
            "texts": {name: category.digest for name, category in upcycle.categories.items()},
            "seed": recipe.texts.seed,
            "tokenizer": pretrain.vocab_size
            if pretrain
            else [tokenizer_hash(upcycle.dense), opening_ids(upcycle.dense_tokenizer)],
        }
        yield Step("texts", partial(actions.make_texts, upcycle), of_texts, stage="dense")
        if pretrain is not None:
            of_dense = {
                "pretrain": pretrain.model_dump(),
                "max_length": recipe.texts.max_length,
                "dtype": recipe.dense.dtype,
            }
            make = partial(actions.pretrain, upcycle)
            yield Step("dense", make, of_dense, ("texts",), stage="dense", costly=True)
        clusters = recipe.clusters.model_dump()
        if recipe.clusters.table is not None:
            clusters["table"] = self._file(recipe.clusters.table)
        vocabulary = ("dense",) if pretrain else ()
        cluster = partial(actions.make_clusters, upcycle)
        yield Step("clusters", cluster, clusters, ("texts", *vocabulary), stage="cluster")

    def _of_seed(self, seed: int) -> Iterator[Step]:
        at = f"seed-{seed}"
        experts = list(self._experts(seed))
        yield from experts
        yield self._merge(seed, tuple(step.name for step in experts) or self._root)
        if any(arm.start == "router" for arm in self.recipe.arms.values()):
            yield Step(
                f"{at}/router",
                partial(actions.train_router, self.upcycle, seed),
                {**self._dense, **self.recipe.router.model_dump(), "seed": seed},
                (f"{at}/merged", "clusters"),
                stage="router",
                costly=True,
            )
        for name in self.recipe.arms:
            yield from self._arm(seed, name)

    def _experts(self, seed: int) -> Iterator[Step]:
        section = self.recipe.experts
        if section.checkpoints is not None:
            return
        shared = section.model_dump(exclude={"processes", "checkpoints"})
        inputs = {**self._dense, **shared, "seed": seed}
        for n in range(self.upcycle.experts):
            make = partial(actions.train_expert, self.upcycle, seed, n)
            name = f"seed-{seed}/experts/{n}"
            yield Step(name, make, inputs, self._root, stage="experts", costly=True)

    def _merge(self, seed: int, predecessors: tuple[str, ...]) -> Step:
        merge: dict[str, Any] = {**self.recipe.merge.model_dump(), "seed": seed}
        checkpoints = self.recipe.experts.checkpoints
        if checkpoints is not None:
            folders = map(local_folder, checkpoints)
            merge["experts"] = [checkpoint_hash(folder, self.digest) for folder in folders]
        make = partial(actions.merge, self.upcycle, seed)
        return Step(f"seed-{seed}/merged", make, merge, predecessors, stage="merge")

    def _arm(self, seed: int, name: str) -> Iterator[Step]:
        recipe, at, arm = self.recipe, f"seed-{seed}", self.recipe.arms[name]
        starts = {"merged": (f"{at}/merged",), "router": (f"{at}/router",), "dense": self._root}
        inputs = {
            **self._dense,
            **recipe.finetune.model_dump(),
            "trainer": recipe.trainer_of(arm),
            "arm": arm.model_dump(mode="json", exclude={"label", "trainer"}),
            "seed": seed,
        }
        trained = f"{at}/arms/{name}"
        make = partial(actions.train_arm, self.upcycle, seed, name)
        yield Step(trained, make, inputs, starts[arm.start], stage="finetune", costly=True)
        measured = recipe.evaluation.model_dump()
        judged = recipe.evaluation.judgement
        if judged is not None and judged.file is not None:
            measured["judgement"]["file"] = self._file(judged.file)
        measured |= {
            "format": MEASURED_FORMAT,
            "length": recipe.texts.max_length,
            "dense": arm.start == "dense",
        }
        make_measured = partial(actions.measure_arm, self.upcycle, trained, arm.start != "dense")
        predecessors = (trained, "clusters")
        yield Step(f"{at}/measured/{name}", make_measured, measured, predecessors, stage="evaluate")

    def _file(self, path: str) -> str:
        return self.digest(Path(path))
