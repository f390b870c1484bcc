"""The comparison as tables, numbered as in P3; once for the page and once as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_finetune.io.tables import markdown
from moe_finetune.upcycle.results import Arm, Estimate, by_category, difference
from moe_finetune.upcycle.texts import SPLITS

MEASURES = {"perplexity": "PPL", "cmr_1": "CMR_1", "cmr_2": "CMR_2", "s_rl": "S_RL"}
TABLE_1, ALL = ["perplexity", "cmr_1", "s_rl"], list(MEASURES)
PAPERS_ORDER = (
    "In the paper's Table 1 it rises (Dense 1.156, BTX 1.169, SvMoE 1.199; with balance 1.187 and "
    "1.245): supervised routing does not improve perplexity there."
)
NOTES = {
    "perplexity": f"PPL: perplexity per text, over texts; lower is better. {PAPERS_ORDER}",
    "cmr_1": "CMR_1: rank by token frequency of the expert that the router ranks first, over "
    "tokens and layers; 1 is best.",
    "cmr_2": "CMR_2: that of the expert that the router ranks second; 2 is best.",
    "s_rl": "S_RL: entropy of the router's probabilities over all experts in nats, over tokens and "
    "layers; lower is surer.",
}


@dataclass(frozen=True)
class Table:
    """A title, what it holds, and cells of text; the first column names the row."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]

    def to_markdown(self) -> str:
        return f"## {self.title}\n{self.note}\n\n{markdown([self.columns, *self.rows])}"


def tables(
    arms: Sequence[Arm], clusters: Mapping[str, int], tokens: Mapping[str, Mapping[str, int]]
) -> list[Table]:
    """All tables that the arms' measurements fill, the paper's first.

    Args:
        arms: measurements.
        clusters: cluster of each category, in the order of the texts.
        tokens: how many each category has in each split.
    """
    found = [_of_splits("Evaluation on the test set (Table 1)", arms, ["test"], TABLE_1)]
    judged = all("judgement" in arm.measured[0] for arm in arms)
    found += [_judgement(arms)] if judged else []
    found.append(_tokens(clusters, tokens))
    routed = [arm for arm in arms if arm.routed]
    found += [_of_splits("CMR_2 on the test set (Table 4)", routed, ["test"], ["cmr_2"])]
    rows = [[str(n + 1), ", ".join(names)] for n, names in _by_cluster(clusters).items()]
    note = "The data that each expert was trained on. Here and in Table 3 expert 0 has the ID 1."
    found.append(Table("Categories of each cluster (Table 5)", note, ["ID", "Categories"], rows))
    others = ["train", "validation"]
    found.append(_of_splits("Evaluation on training and validation (Table 6)", arms, others, ALL))
    found += _of_categories(arms, list(clusters))
    found += [_top_k_entropy(routed)] if routed else []
    found += [_differences(arms)] if len(arms) > 1 else []
    return found


def _of_splits(
    title: str, arms: Sequence[Arm], splits: Sequence[str], names: Sequence[str]
) -> Table:
    """The measures of every arm on some splits, a row each as in the paper."""
    rows = [
        [*([split] if len(splits) > 1 else []), arm.name]
        + [_spread(arm, n, split) if arm.routed or n == "perplexity" else "–" for n in names]
        for split in splits
        for arm in arms
    ]
    columns = [*(["split"] if len(splits) > 1 else []), "model", *(MEASURES[n] for n in names)]
    notes = ["Mean ± standard deviation; in brackets the 95 % interval of the mean over seeds."]
    notes += [NOTES[name] for name in names]
    return Table(title, " ".join(notes), columns, rows)


def _tokens(clusters: Mapping[str, int], tokens: Mapping[str, Mapping[str, int]]) -> Table:
    rows = []
    for cluster, names in _by_cluster(clusters).items():
        counts = [sum(tokens[name][split] for name in names) for split in SPLITS]
        rows.append([str(cluster + 1), *(f"{count:,}" for count in (*counts, sum(counts)))])
    note = "With the tokens that begin and end each text."
    columns = ["ID", *SPLITS, "total"]
    return Table("Tokens of each cluster (Table 3)", note, columns, rows)


def _by_cluster(clusters: Mapping[str, int]) -> dict[int, list[str]]:
    return {
        number: [name for name, cluster in clusters.items() if cluster == number]
        for number in sorted(set(clusters.values()))
    }


def _judgement(arms: Sequence[Arm]) -> Table:
    shots = arms[0].measured[0]["judgement"]["shots"]
    rows = []
    for arm in arms:
        held = [m["judgement"] for m in arm.measured]
        accuracy = Estimate.of([each["accuracy"] for each in held])
        error = float(np.mean([each["stderr"] for each in held]))
        yes = float(np.mean([each["yes"] for each in held]))
        cell = f"{100 * accuracy.mean:.1f} ± {100 * error:.1f} {_interval(accuracy, 100.0, 1)}"
        sums = float(np.mean([each["accuracy_of_sums"] for each in held]))
        cells = [cell.strip(), f"{100 * yes:.0f}", str(held[0]["count"]), f"{100 * sums:.1f}"]
        rows.append([arm.name, *cells])
    no, yes_tokens = arms[0].measured[0]["judgement"]["answer_tokens"]
    note = (
        "Accuracy in % ± standard error over questions; in brackets the interval over seeds. The "
        f"answers, no of {no} tokens and yes of {yes_tokens}, are compared by their mean "
        "log-probability per token; the last column is the accuracy of sums."
    )
    columns = ["", "accuracy", "answered yes, %", "questions", "by sums, %"]
    return Table(f"Binary judgement, {shots} solved examples (Table 2)", note, columns, rows)


def _of_categories(arms: Sequence[Arm], categories: Sequence[str]) -> list[Table]:
    """Perplexity and judgement of each category, an arm a column; the paper has no such table."""
    held = [by_category(arm, categories) for arm in arms]
    categories = list(held[0])
    columns = ["", *(arm.name for arm in arms)]
    rows = [
        [name, *(_cell(of_arm[name]["perplexity"], 1.0, 3) for of_arm in held)]
        for name in categories
    ]
    note = (
        "Mean perplexity of the category's test texts; in brackets the interval over seeds. "
        f"{NOTES['perplexity']}"
    )
    found = [Table("Perplexity by category, test", note, columns, rows)]
    judged = [name for name in categories if all("judgement" in of_arm[name] for of_arm in held)]
    if judged:
        asked = {name: arms[0].measured[0]["judgement"]["categories"][name][1] for name in judged}
        rows = [
            [
                f"{name} ({asked[name]})",
                *(_cell(of_arm[name]["judgement"], 100.0, 1) for of_arm in held),
            ]
            for name in judged
        ]
        note = "Accuracy in %; in brackets the number of questions, then the interval over seeds."
        found.append(Table("Judgement by category", note, columns, rows))
    return found


def _cell(estimate: Estimate, factor: float, digits: int) -> str:
    shown = f"{factor * estimate.mean:.{digits}f}"
    return f"{shown} {_interval(estimate, factor, digits)}".strip()


def _top_k_entropy(arms: Sequence[Arm]) -> Table:
    columns = ["model", *SPLITS]
    rows = [[arm.name, *(_spread(arm, "score_entropy", split) for split in SPLITS)] for arm in arms]
    note = "Entropy in nats of the scores that weigh the chosen experts; S_RL is of all experts."
    return Table("Entropy of the top-k scores", note, columns, rows)


def _differences(arms: Sequence[Arm]) -> Table:
    last = arms[-1]
    names = MEASURES
    rows = []
    for other in arms[:-1]:
        cells = [f"{last.name} − {other.name}"]
        for metric in names:
            both = metric == "perplexity" or (last.routed and other.routed)
            found = difference(last, other, metric) if both else None
            cells.append(f"{found.mean:+.3f} {_interval(found)}".strip() if found else "–")
        rows.append(cells)
    note = f"Paired by seed; an interval without 0 says that the two differ. {NOTES['perplexity']}"
    return Table(f"Differences on test: {last.name}", note, ["", *names.values()], rows)


def _spread(arm: Arm, metric: str, split: str) -> str:
    estimate = arm.estimate(metric, split)
    splits = [each["splits"][split] for each in arm.measured]
    held = [s["perplexity"] if metric == "perplexity" else s["routing"][metric] for s in splits]
    std = float(np.mean([each["std"] for each in held]))
    return f"{estimate.mean:.3f} ± {std:.2f} {_interval(estimate)}".strip()


def _interval(estimate: Estimate, factor: float = 1.0, digits: int = 3) -> str:
    if math.isnan(estimate.low):
        return ""
    return f"[{factor * estimate.low:.{digits}f}, {factor * estimate.high:.{digits}f}]"
