"""The measurements of all arms as a study's results, for its table, tests and page.

A run is one arm of one seed on some texts: a split, or the test texts of a category. Arms are
compared within the same texts, each with the last arm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import RecipeError
from moe_finetune.io.json_file import read_object
from moe_finetune.study.read_study import RunResult, StudyResults
from moe_finetune.study.table import Table
from moe_finetune.upcycle.schema import UpcycleRecipe
from moe_finetune.upcycle.texts import SPLITS, Split

CLUSTERS = "clusters.json"
MEASURED = "measured.json"
CURVES = "curves"
REMEDY = "delete its folder and repeat the command with --resume"
ROUTING = ("cmr_1", "cmr_2", "s_rl", "score_entropy")
METRICS = dict.fromkeys(("perplexity", *ROUTING), "lower")
NOTES = (
    "perplexity: per text, over texts. In the paper's Table 1 it rises (Dense 1.156, BTX 1.169, "
    "SvMoE 1.199; with balance 1.187 and 1.245): supervised routing does not improve it there.",
    "cmr_1: rank by token frequency of the expert that the router ranks first, over tokens and "
    "layers; 1 is best. cmr_2: the rank of its second expert; 2 is best.",
    "s_rl: entropy of the router's probabilities over all experts; score_entropy: of the top-k "
    "scores. Both in nats; a lower one is a more confident router.",
    "The others are the scores of evaluation.suite; judgement: accuracy on questions with two "
    "answers of as many tokens.",
)

Values = dict[str, float]


@dataclass(frozen=True)
class MeasuredRun(RunResult):
    """An arm of a seed on some texts: values by metric, without logs."""

    measured: Values = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        return self.measured.get(metric)

    def curve(self, metric: str) -> dict[float, float]:
        return {}


def measured_folder(output: Path, seed: int, arm: str) -> Path:
    """Folder of the step that measures an arm."""
    return output / f"seed-{seed}" / "measured" / arm


def read_measured(recipe: UpcycleRecipe, output: Path) -> dict[str, list[dict[str, Any]]]:
    """The measurements of each arm by label, one per seed; all must be done."""
    return {
        arm.label or name: [
            read_object(measured_folder(output, seed, name) / MEASURED, RecipeError, REMEDY)
            for seed in recipe.seeds
        ]
        for name, arm in recipe.arms.items()
    }


def split_results(
    measured: Mapping[str, Sequence[Mapping[str, Any]]], seeds: list[int], output: Path
) -> StudyResults:
    """Every metric on test, validation and training texts."""
    texts = {
        f"{split} texts": lambda one, split=split: _split_values(one, split)
        for split in reversed(SPLITS)
    }
    title = "Arms on test, training and validation texts (Tables 1, 2, 4 and 6)"
    return _results(title, measured, seeds, output, texts)


def category_results(
    measured: Mapping[str, Sequence[Mapping[str, Any]]],
    seeds: list[int],
    output: Path,
    categories: Sequence[str],
) -> StudyResults:
    """Perplexity and scores on each category's test texts; the paper has no such table."""
    texts = {
        name: lambda one, index=index, name=name: _category_values(one, index, name)
        for index, name in enumerate(categories)
    }
    return _results("Arms on each category's test texts", measured, seeds, output, texts)


def _results(
    title: str,
    measured: Mapping[str, Sequence[Mapping[str, Any]]],
    seeds: list[int],
    output: Path,
    texts: Mapping[str, Callable[[Mapping[str, Any]], Values]],
) -> StudyResults:
    labels = list(measured)
    runs = [
        MeasuredRun(
            arm=f"{name}: {label}",
            seed=seed,
            values={"texts": name, "arm": label},
            folder=output,
            state="finished",
            reason="",
            recipe_sha256="",
            measured=values,
        )
        for name, values_of in texts.items()
        for label in labels
        for seed, one in zip(seeds, measured[label], strict=True)
        if (values := values_of(one))
    ]
    present = dict.fromkeys(metric for run in runs for metric in run.measured)
    # A score of the suite is better where it is higher.
    metrics = {metric: METRICS.get(metric, "higher") for metric in [*METRICS, *present]
               if metric in present}  # fmt: skip
    return StudyResults(
        folder=output,
        name="upcycle",
        title=title,
        source="",
        axes={"texts": list(texts), "arm": labels},
        seeds=seeds,
        baseline={"arm": labels[-1]},
        curves={},
        together=[],
        benchmarks=[],
        metrics=metrics,
        runs=list(runs),
    )


def _split_values(one: Mapping[str, Any], split: Split) -> Values:
    measured = one["splits"][split]
    values = {"perplexity": measured["perplexity"]["mean"]}
    if "routing" in measured:
        values |= {metric: measured["routing"][metric]["mean"] for metric in ROUTING}
    if split == "test":
        values |= {label: score["value"] for label, score in one.get("scores", {}).items()}
    return values


def _category_values(one: Mapping[str, Any], index: int, name: str) -> Values:
    test = one["splits"]["test"]
    losses = [
        loss
        for loss, category in zip(test["losses"], test["categories"], strict=True)
        if category == index
    ]
    values = {"perplexity": float(np.exp(losses).mean())} if losses else {}
    for label, score in one.get("scores", {}).items():
        if name in score["categories"]:
            right, questions = score["categories"][name]
            values[label] = right / questions
    return values


def cluster_rows(
    clusters: Mapping[str, int], tokens: Mapping[str, Mapping[str, int]]
) -> list[list[str]]:
    """Categories and tokens of each cluster (Tables 3 and 5), headings first.

    IDs begin at 1, as in the paper. Token counts include those that begin and end a text.
    """
    rows = [["ID", "categories", *SPLITS, "total"]]
    for cluster_id in sorted(set(clusters.values())):
        names = [name for name, cluster in clusters.items() if cluster == cluster_id]
        counts = [sum(tokens[name][split] for name in names) for split in SPLITS]
        texts = [f"{count:,}" for count in (*counts, sum(counts))]
        rows.append([str(cluster_id + 1), ", ".join(names), *texts])
    return rows


def summarize(measured: Mapping[str, Sequence[Mapping[str, Any]]], table: Table) -> dict[str, Any]:
    """Mean and seeds' values by arm, split and metric, and the whole table with its tests."""
    arms: dict[str, Any] = {
        label: {"parameters": by_seed[0]["parameters"], "splits": {}}
        for label, by_seed in measured.items()
    }
    for group, row in table.rows:
        arms[row.label]["splits"][group.name.removesuffix(" texts")] = {
            metric: {"mean": cell.mean, "seeds": list(cell.values.values())}
            for metric, cell in row.cells.items()
        }
    return {"arms": arms, "table": table.to_mapping()}
