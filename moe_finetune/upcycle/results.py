"""What the arms' measurements say together: means over seeds, intervals, paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import RecipeError
from moe_finetune.io.json_file import read_object
from moe_finetune.metrics.statistics import t_interval
from moe_finetune.upcycle.files import MEASURED_FILE, REMEDY
from moe_finetune.upcycle.recipe import UpcycleRecipe


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (Student's t; NaN ends for one seed)."""

    values: tuple[float, ...]
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value a seed."""
        found = t_interval(values)
        ends = (found.low, found.high) if found.seeds > 1 else (math.nan, math.nan)
        return cls(tuple(map(float, values)), found.mean, *ends)

    def to_mapping(self) -> dict[str, Any]:
        ends = [None if math.isnan(end) else end for end in (self.low, self.high)]
        return {"mean": self.mean, "interval": ends, "seeds": list(self.values)}


METRICS: dict[str, Callable[[dict[str, Any], str], float]] = {
    "perplexity": lambda m, split: m["splits"][split]["perplexity"]["mean"],
    "perplexity_of_all_tokens": lambda m, split: m["splits"][split]["perplexity"]["of_all_tokens"],
    "cmr_1": lambda m, split: m["splits"][split]["routing"]["cmr_1"]["mean"],
    "cmr_2": lambda m, split: m["splits"][split]["routing"]["cmr_2"]["mean"],
    "s_rl": lambda m, split: m["splits"][split]["routing"]["s_rl"]["mean"],
    "score_entropy": lambda m, split: m["splits"][split]["routing"]["score_entropy"]["mean"],
}
OF_ROUTERS = ("cmr_1", "cmr_2", "s_rl", "score_entropy")


@dataclass(frozen=True)
class Arm:
    """One arm's measurements, a mapping for each seed."""

    name: str
    measured: tuple[dict[str, Any], ...]

    @property
    def routed(self) -> bool:
        return "routing" in self.measured[0]["splits"]["test"]

    def estimate(self, metric: str, split: str = "test") -> Estimate:
        return Estimate.of([METRICS[metric](each, split) for each in self.measured])


def read_arms(recipe: UpcycleRecipe, output: Path) -> list[Arm]:
    """The measurements of every arm and seed; all steps ``measured`` are done."""
    arms = []
    for name, arm in recipe.arms.items():
        files = [
            output / f"seed-{seed}" / "measured" / name / MEASURED_FILE for seed in recipe.seeds
        ]
        measured = [read_object(file, RecipeError, REMEDY) for file in files]
        arms.append(Arm(arm.label or name, tuple(measured)))
    return arms


def by_category(arm: Arm, categories: Sequence[str]) -> dict[str, dict[str, Estimate]]:
    """Scores of one arm on each category's test texts; a category without any is left out.

    ``perplexity`` (mean over texts) and, where questions of the category were asked, ``judgement``
    (accuracy).
    """
    found: dict[str, dict[str, Estimate]] = {}
    for number, name in enumerate(categories):
        tests = [each["splits"]["test"] for each in arm.measured]
        if number not in tests[0]["categories"]:
            continue
        values = [
            float(np.exp([x for x, c in pairs if c == number]).mean())
            for test in tests
            if (pairs := list(zip(test["losses"], test["categories"], strict=True)))
        ]
        found[name] = {"perplexity": Estimate.of(values)}
        answered = [m.get("judgement", {}).get("categories", {}).get(name) for m in arm.measured]
        if all(answered):
            found[name]["judgement"] = Estimate.of([right / asked for right, asked in answered])
    return found


def summarize(arms: Sequence[Arm], categories: Sequence[str]) -> dict[str, Any]:
    """``results.json``: every metric of every arm and split, and paired differences on test.

    A difference is the last arm's value minus another's of the same seed; an interval that does
    not hold 0 says that they differ.
    """
    from moe_finetune.upcycle.texts import SPLITS

    found: dict[str, Any] = {"arms": {}, "differences_on_test": {}}
    for arm in arms:
        splits: dict[str, Any] = {}
        for split in SPLITS:
            splits[split] = {
                name: arm.estimate(name, split).to_mapping()
                for name in METRICS
                if arm.routed or name not in OF_ROUTERS
            }
        found["arms"][arm.name] = {"parameters": arm.measured[0]["parameters"], "splits": splits}
        if "judgement" in arm.measured[0]:
            accuracy = Estimate.of([each["judgement"]["accuracy"] for each in arm.measured])
            found["arms"][arm.name]["judgement_accuracy"] = accuracy.to_mapping()
        found["arms"][arm.name]["categories_on_test"] = {
            name: {key: value.to_mapping() for key, value in scores.items()}
            for name, scores in by_category(arm, categories).items()
        }
    last = arms[-1]
    for other in arms[:-1]:
        names = METRICS if last.routed and other.routed else METRICS.keys() - set(OF_ROUTERS)
        found["differences_on_test"][f"{last.name} - {other.name}"] = {
            name: difference(last, other, name).to_mapping() for name in METRICS if name in names
        }
    return found


def difference(arm: Arm, other: Arm, metric: str, split: str = "test") -> Estimate:
    """Paired difference of a metric, ``arm`` minus ``other``, seed by seed."""
    read = METRICS[metric]
    pairs = zip(arm.measured, other.measured, strict=True)
    return Estimate.of([read(a, split) - read(b, split) for a, b in pairs])
