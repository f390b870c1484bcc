"""One benchmark's score: value, uncertainty, items, and direction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy.stats import norm

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.results import (
    SAMPLE,
    Results,
    TaskResult,
    load_samples,
    samples_file,
)
from moe_finetune.evaluation.statistics import (
    PairedTest,
    compare_items,
    compare_seeds,
    newcombe,
    newcombe_p,
    normal,
    wilson,
)

ZERO_ONE = ("exact_match", "acc", "acc_norm", "accuracy", "pass@1", "pass_at_1")
# Key of an item (task, hash, occurrence) -> hash of its prompts, value of the headline metric.
Items = dict[tuple[str, str, int], tuple[str, float]]
# For results that declare no direction: words in names that mean lower is better (lm-eval's
# registry, and the usual error rates).
_LOWER_IS_BETTER = {"loss", "nll", "perplexity", "bits", "brier", "error", "errors", "mse", "rmse",
                    "mae", "wer", "cer", "ter", "ece"}  # fmt: skip


def higher_is_better(task: Mapping[str, Any]) -> bool:
    """Whether a higher headline metric of a task is better: as declared, else by its name."""
    declared = task.get("higher_is_better")
    if isinstance(declared, bool):
        return declared
    words = re.split(r"[^a-z]+", str(task.get("metric") or "").lower())
    return not _LOWER_IS_BETTER.intersection(words)


@dataclass(frozen=True)
class Score:
    """One benchmark's result. ``n`` items; ``stderr`` of the mean; NaN where unknown."""

    value: float
    metric: str = ""
    stderr: float = math.nan
    n: int | None = None
    chance: float = math.nan
    higher_is_better: bool = True
    others: dict[str, tuple[float, float]] = field(default_factory=dict)  # value, stderr
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    task: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def items(self) -> Items:
        """Hash of the prompts and value of each item; empty without samples."""
        name = self.task.get("samples")
        if self.folder is None or not name or not (self.folder / name).is_file():
            return {}
        return item_values(self.folder, cast(TaskResult, self.task))

    @classmethod
    def parse(cls, task: Mapping[str, Any], folder: Path | None = None) -> Score:
        """Read a task of the ``results.json`` in ``folder``; missing values are NaN or None."""
        n = _number(task.get("n"))
        return cls(
            value=_number(task.get("value")),
            metric=str(task.get("metric") or ""),
            stderr=_number(task.get("stderr")),
            n=int(n) if math.isfinite(n) else None,
            chance=_number(task.get("chance")),
            higher_is_better=higher_is_better(task),
            others={
                name: (_number(other.get("value")), _number(other.get("stderr")))
                for name, other in (task.get("metrics") or {}).items()
                if isinstance(other, dict)
            },
            notes=tuple(map(str, task.get("notes") or ())),
            folder=folder,
            task=dict(task),
        )

    @property
    def is_share(self) -> bool:
        """Whether the value is a share of items, to be read as a percentage."""
        names = (*ZERO_ONE, "f1", "match", "rate", "share", "pass")
        return 0 <= self.value <= 1 and any(name in self.metric.lower() for name in names)

    @property
    def is_zero_one(self) -> bool:
        """Whether every item counts 0 or 1, so that the score is a binomial share."""
        if self.n is None or self.n < 2 or not 0 <= self.value <= 1:
            return False
        if self.metric.split(",")[0].lower() not in ZERO_ONE:
            return False
        expected = math.sqrt(self.value * (1 - self.value) / (self.n - 1))
        return math.isnan(self.stderr) or math.isclose(self.stderr, expected, rel_tol=0.1)

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval: Wilson's for shares of 0/1 items, else value ± 1.96 stderr."""
        if math.isnan(self.value):
            return None
        if self.is_zero_one:
            assert self.n is not None
            return wilson(self.value, self.n)
        if math.isnan(self.stderr):
            return None
        return normal(self.value, self.stderr)


def scores_of(results: Results, folder: Path) -> dict[str, Score]:
    """The scored tasks of the ``results.json`` in ``folder``."""
    scores = {name: Score.parse(task, folder) for name, task in results["tasks"].items()}
    return {name: score for name, score in scores.items() if not math.isnan(score.value)}


def compare_scores(
    baseline: Sequence[Score],
    arm: Sequence[Score],
    rng: int | np.random.Generator = 0,
) -> PairedTest:
    """Compare one benchmark's scores with the baseline's; a score for each seed, in the same order.

    If both answered the same prompts and the scores are means over their items, the test is over
    items, and also over seeds if there are several. Otherwise it is Student's paired t test over
    seeds. A single seed gets Newcombe's interval for shares of 0/1 items, else the normal test,
    both for independent samples. There is no test if metrics or their directions differ.

    The verdict depends on what is shown together: :func:`.statistics.decide_together`.
    """
    if len(baseline) != len(arm) or not arm:
        raise ValueError(
            f"{len(baseline)} and {len(arm)} seeds; expected equal numbers, at least one"
        )
    if len({(score.metric, score.higher_is_better) for score in (*baseline, *arm)}) > 1:
        return PairedTest("none", math.nan)
    if (values := _item_values(baseline, arm)) is not None:
        return compare_items(*values, rng)
    sides = [np.array([score.value for score in side]) for side in (arm, baseline)]
    if len(arm) > 1:
        return compare_seeds(*sides)
    (first,), (second,) = baseline, arm
    difference = second.value - first.value
    if first.is_zero_one and second.is_zero_one:
        assert first.n is not None and second.n is not None
        shares = (first.value, first.n, second.value, second.n)
        return PairedTest("Newcombe", difference, *newcombe(*shares), newcombe_p(*shares))
    stderr = math.hypot(first.stderr, second.stderr)
    if math.isnan(stderr + difference):
        return PairedTest("none", difference)
    p = 2 * float(norm.sf(abs(difference) / stderr)) if stderr else float(difference == 0)
    return PairedTest("normal", difference, *normal(difference, stderr), p)


def _item_values(
    baseline: Sequence[Score], arm: Sequence[Score]
) -> tuple[np.ndarray, np.ndarray] | None:
    """The arm's and the baseline's values by item, shape (seeds, items) each.

    None if a run answered other prompts, or if a score is not the mean of its items: a corpus
    metric has no values by item, and a mean over groups is not a mean over items.
    """
    everyone = [*baseline, *arm]
    keys = list(everyone[0].items)
    if not keys or any(
        score.metric != everyone[0].metric or not same_prompts(everyone[0], score)
        for score in everyone
    ):
        return None
    arm_SN, baseline_SN = (
        np.array([[score.items[key][1] for key in keys] for score in side])
        for side in (arm, baseline)
    )
    for values_SN, side in ((arm_SN, arm), (baseline_SN, baseline)):
        for values_N, score in zip(values_SN, side, strict=True):
            scale = max(1.0, abs(score.value))
            if not abs(float(values_N.mean()) - score.value) <= 1e-4 * scale:
                return None
    return arm_SN, baseline_SN


def same_prompts(a: Score, b: Score) -> bool:
    """Return whether both scores are of the same items and prompts."""
    return a.items.keys() == b.items.keys() and all(
        a.items[key][0] == b.items[key][0] for key in a.items
    )


def check_joined(name: str, scores: Sequence[Score]) -> None:
    """Raise EvaluationError unless all scores are of the same metric, items and prompts."""
    metrics = sorted({_directed(score) for score in scores})
    if len(metrics) > 1:
        raise EvaluationError(
            f"task {name}: the results are of different metrics ({' and '.join(metrics)}); "
            "evaluate both with the same suite and version"
        )
    first = scores[0].items
    for score in scores[1:]:
        other = score.items
        if first.keys() != other.keys():
            common = len(first.keys() & other.keys())
            raise EvaluationError(
                f"task {name}: the results cover other items ({len(first)} and {len(other)}, "
                f"{common} in common); evaluate with the same data and limit"
            )
        differing = sum(first[key][0] != other[key][0] for key in first)
        if differing:
            raise EvaluationError(
                f"task {name}: {differing} of {len(first)} prompts differ"
                f"{_asked_otherwise(scores[0].task, score.task)}; results are comparable only with "
                "the same shots, chat, template and seed"
            )


def _asked_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The options of a suite's line in which two results differ, with both values."""
    keys = [key for key in ("shots", "chat", "enable_thinking") if one.get(key) != other.get(key)]
    values = (f"{key} is {_yaml(one.get(key))} and {_yaml(other.get(key))}" for key in keys)
    return f" ({', '.join(values)})" if keys else ""


def _yaml(value: Any) -> str:
    return {None: "not set", True: "true", False: "false"}.get(value, str(value))


def _directed(score: Score) -> str:
    return f"{score.metric}, {'higher' if score.higher_is_better else 'lower'} is better"


def item_values(folder: Path, task: TaskResult) -> Items:
    """Return (task, item, occurrence) -> (hash of the prompts, value of the headline metric)."""
    values: Items = {}
    rows = load_samples(folder, task)
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("metrics"), dict) or not all(
            isinstance(row.get(key), str) for key in SAMPLE
        ):
            raise EvaluationError(
                f"{samples_file(folder, task)}:{number}: a row needs 'metrics' and the texts "
                f"{', '.join(SAMPLE)}; evaluate again"
            )
    filters = {row["filter"] for row in rows}
    headline_filter = task["filter"] if task.get("filter") in filters else min(filters)
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["filter"] != headline_filter:
            continue
        item = (row["task"], row["item"])
        seen[item] = seen.get(item, -1) + 1
        value = row["metrics"].get(task.get("metric"))  # True and False count 1 and 0
        numeric = float(value) if isinstance(value, (int, float)) else math.nan
        values[(*item, seen[item])] = (row["prompt_sha256"], numeric)
    return values


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else math.nan
