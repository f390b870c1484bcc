"""The comparison as tables, numbered as in P3; once for the page and once as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_finetune.io.tables import markdown
from moe_finetune.upcycle.results import Arm, Estimate, by_category, difference
from moe_finetune.upcycle.texts import SPLITS


@dataclass(frozen=True)
class Table:
    """A title, what it holds, and cells of text; the first column names the row."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]

    def to_markdown(self) -> str:
        return f"## {self.title}\n{self.note}\n\n{markdown([self.columns, *self.rows])}"


def tables(arms: Sequence[Arm], categories: Sequence[str]) -> list[Table]:
    """All tables that the arms' measurements fill; ``categories`` in the order of the texts."""
    routed = [arm for arm in arms if arm.routed]
    found = [_perplexity(arms)]
    if all("judgement" in arm.measured[0] for arm in arms):
        found.append(_judgement(arms))
    found += _of_categories(arms, categories)
    if routed:
        found += [_ranks(routed), _entropy(routed)]
    if len(arms) > 1:
        found.append(_differences(arms))
    return found


def _perplexity(arms: Sequence[Arm]) -> Table:
    rows = [[arm.name, *(_spread(arm, "perplexity", split) for split in SPLITS)] for arm in arms]
    note = (
        "Mean over texts ± standard deviation over texts; in brackets the 95 % interval of the "
        "mean over seeds. Lower is better."
    )
    return Table("Perplexity per text (Table 1)", note, ["", *SPLITS], rows)


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
    """Perplexity and judgement of each category, an arm a column (P3 Table 3)."""
    held = [by_category(arm, categories) for arm in arms]
    categories = list(held[0])
    columns = ["", *(arm.name for arm in arms)]
    rows = [
        [name, *(_cell(of_arm[name]["perplexity"], 1.0, 3) for of_arm in held)]
        for name in categories
    ]
    note = (
        "Mean perplexity of the category's test texts; in brackets the interval over seeds. The "
        "paper's table is by category, too; which measure to take for texts of one's own is ours."
    )
    found = [Table("Perplexity by category, test (Table 3)", note, columns, rows)]
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
        found.append(Table("Judgement by category (Table 3)", note, columns, rows))
    return found


def _cell(estimate: Estimate, factor: float, digits: int) -> str:
    shown = f"{factor * estimate.mean:.{digits}f}"
    return f"{shown} {_interval(estimate, factor, digits)}".strip()


def _ranks(arms: Sequence[Arm]) -> Table:
    columns = ["", *(f"CMR_{k}, {split}" for k in (1, 2) for split in SPLITS)]
    rows = []
    for arm in arms:
        cells = [arm.name]
        for k in ("cmr_1", "cmr_2"):
            cells += [_spread(arm, k, split) for split in SPLITS]
        rows.append(cells)
    note = (
        "Rank by token frequency of the expert that the router ranks first and second: mean ± "
        "standard deviation over tokens and layers; in brackets the interval over seeds. 1 is best "
        "for CMR_1 and 2 for CMR_2."
    )
    return Table("Conditional mean rank (Table 4)", note, columns, rows)


def _entropy(arms: Sequence[Arm]) -> Table:
    columns = ["", *(f"S_RL, {split}" for split in SPLITS), "of the top-k scores, test"]
    rows = []
    for arm in arms:
        cells = [_spread(arm, "s_rl", split) for split in SPLITS]
        rows.append([arm.name, *cells, _spread(arm, "score_entropy", "test")])
    experts = len(arms[0].measured[0]["splits"]["test"]["routing"]["selected"][0][0])
    note = (
        f"Entropy of the router's probabilities in nats, at most ln {experts} = "
        f"{math.log(experts):.2f}: mean ± standard deviation over tokens and layers; in brackets "
        "the interval over seeds."
    )
    return Table("Router entropy S_RL (Table 6)", note, columns, rows)


def _differences(arms: Sequence[Arm]) -> Table:
    last = arms[-1]
    names = {"perplexity": "perplexity", "cmr_1": "CMR_1", "cmr_2": "CMR_2", "s_rl": "S_RL"}
    rows = []
    for other in arms[:-1]:
        cells = [f"{last.name} − {other.name}"]
        for metric in names:
            both = metric == "perplexity" or (last.routed and other.routed)
            found = difference(last, other, metric) if both else None
            cells.append(f"{found.mean:+.3f} {_interval(found)}".strip() if found else "–")
        rows.append(cells)
    note = "Paired by seed; an interval without 0 says that the two differ."
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
