"""What the steps below a seed do: train, merge, measure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.io import write_atomic
from moe_finetune.models.loading import local_folder
from moe_finetune.recipe.method import resolve_method
from moe_finetune.upcycle.files import MEASURED_FILE, TABLE_FILE

if TYPE_CHECKING:
    from moe_finetune.upcycle.recipe import ArmSection
    from moe_finetune.upcycle.stages import Upcycle


@dataclass(frozen=True)
class Train:
    """A step that trains: an expert, the routers (neither given), or an arm."""

    upcycle: Upcycle
    seed: int
    arm: ArmSection | None = None
    expert: int | None = None

    def __call__(self, target: Path, work: Path) -> None:
        """Train from the right start on the right texts."""
        from moe_finetune.upcycle.training import Job, run_job

        upcycle, recipe = self.upcycle, self.upcycle.recipe
        at, length = upcycle.output / f"seed-{self.seed}", recipe.texts.max_length
        everything: Any = range(len(upcycle.texts.categories))
        seed = 1000 * self.seed
        if self.expert is not None:
            own = np.flatnonzero(upcycle.clusters_C == self.expert)
            seed += 1 + self.expert
            job = Job(
                upcycle.dense,
                upcycle.texts.blocks(own.tolist(), length, seed),
                recipe.experts.trainer,
                seed,
                recipe.dense.dtype,
                lora=recipe.experts.lora,
            )
        elif self.arm is None:
            table = str(upcycle.output / "clusters" / TABLE_FILE)
            method = resolve_method(
                "supervised_routing", terms={"supervised_routing": {"table": table}}
            )
            rows_RS = upcycle.texts.blocks(everything, length, seed)
            job = Job(
                at / "merged",
                rows_RS,
                recipe.router.trainer,
                seed,
                recipe.dense.dtype,
                method=method,
                routers_only=True,
            )
        else:
            start = {"dense": upcycle.dense, "merged": at / "merged", "router": at / "router"}
            job = Job(
                start[self.arm.start],
                upcycle.texts.blocks(everything, length, seed),
                {**recipe.finetune.trainer, **self.arm.trainer},
                seed,
                recipe.dense.dtype,
                method=None if self.arm.start == "dense" else self.arm.method,
                lora=recipe.finetune.lora,
            )
        run_job(job, work, target)


@dataclass(frozen=True)
class Merge:
    """The step that puts the experts of a seed together."""

    upcycle: Upcycle
    seed: int

    def __call__(self, target: Path, work: Path) -> None:
        """Merge this seed's experts, or the recipe's ready ones."""
        from moe_finetune.upcycle.merge import merge_experts

        recipe = self.upcycle.recipe
        experts = self.upcycle.output / f"seed-{self.seed}" / "experts"
        folders = [experts / str(n) for n in range(self.upcycle.experts)]
        if recipe.experts.checkpoints is not None:
            folders = [local_folder(path) for path in recipe.experts.checkpoints]
        section = recipe.merge
        merge_experts(
            folders, target, top_k=section.top_k, router_std=section.router_std, seed=self.seed
        )


@dataclass(frozen=True)
class Measure:
    """The step that measures one arm."""

    upcycle: Upcycle
    checkpoint: str
    arm: ArmSection

    def __call__(self, target: Path, work: Path) -> None:
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
        made = work / "made"
        made.mkdir(exist_ok=True)
        write_atomic(made / MEASURED_FILE, json.dumps(found, ensure_ascii=False) + "\n")
        target.parent.mkdir(parents=True, exist_ok=True)
        made.rename(target)
