"""The comparison as tables, numbered as in P3; once for the page and once as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_finetune.io.tables import markdown
from moe_finetune.upcycle.results import Arm, Estimate, difference
from moe_finetune.upcycle.texts import SPLITS


@dataclass(frozen=True)
class Table:
    """A title, what it holds, and cells of text; the first column names the row."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]

    def to_markdown(self) -> str:
        """A heading, the note, and a pipe table."""
        return f"## {self.title}\n{self.note}\n\n{markdown([self.columns, *self.rows])}"


def tables(arms: Sequence[Arm]) -> list[Table]:
    """All tables that the arms' measurements fill."""
    routed = [arm for arm in arms if arm.routed]
    found = [_perplexity(arms)]
    if all("judgement" in arm.measured[0] for arm in arms):
        found.append(_judgement(arms))
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
        rows.append([arm.name, cell.strip(), f"{100 * yes:.0f}", str(held[0]["count"])])
    note = "Accuracy in % ± standard error over questions; in brackets the interval over seeds."
    columns = ["", "accuracy", "answered yes, %", "questions"]
    return Table(f"Binary judgement, {shots} solved examples (Table 2)", note, columns, rows)


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
