"""Claims about runs, as data: read from YAML, tested on results, written as one table.

A file of ``eval/effects/*.yaml`` names an ordinary study, or programs that have no recipe, and the
effects that a paper claims. The verdict on an effect is that of its first row.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from moe_finetune.errors import RecipeError
from moe_finetune.evaluation.statistics import Interval, t_interval
from moe_finetune.io import write_atomic
from moe_finetune.io.text_tables import markdown

Verdict = Literal["reproduced", "sign only", "not reproduced", "opposite", "not run"]
WORDS: Mapping[Verdict, str] = {
    "reproduced": "sign and significance",
    "sign only": "sign only",
    "not reproduced": "not",
    "opposite": "**opposite**, significant",
    "not run": "not run",
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Row(_Part):
    """One comparison, over the seeds that both sides have.

    Attributes:
        metric: a logged value, one of ``routing/after.json``, or a program's.
        arm: the runs; a list makes a row for each.
        against: the arm that is subtracted seed by seed, or a number.
        claim: the sign of the difference; ``same``: its interval stays within ``margin``, a share
            of the baseline's mean.
        at_most: the claim is met only if the arm's mean is at most this share of the baseline's.
        read: ``end``: the last value; ``quarter``: the mean of the last quarter of the log;
            ``change``: that minus the first quarter's; ``rmse``: the distance of the arm's logged
            curve from that of ``other_arm``.
    """

    metric: str
    arm: str | list[str]
    against: str | float
    claim: Literal["up", "down", "same"]
    margin: float = 0.1
    at_most: float | None = None
    read: Literal["end", "quarter", "change", "rmse"] = "end"
    other_arm: str | None = None


class Effect(_Part):
    """A headline effect: the paper's words, and the comparisons that test it."""

    number: int
    name: str
    paper: str
    rows: list[Row]


class Program(_Part):
    """Runs that are no recipe: ``module.run(settings, options of the arm, seed)`` makes one."""

    module: str
    settings: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]]


class Claims(_Part):
    """A file of claims."""

    title: str
    seeds: list[int] = Field(default_factory=list)
    study: str | None = None
    programs: dict[str, Program] = Field(default_factory=dict)
    pictures: dict[str, str] = Field(default_factory=dict)
    effects: list[Effect]


class Result(Protocol):
    """A run of a study or of a program."""

    def value(self, metric: str) -> float | None: ...

    def curve(self, metric: str) -> dict[int, float]: ...


class Made:
    """A program's result: numbers, lists (a value is their mean) and curves over steps."""

    def __init__(self, numbers: Mapping[str, Any]):
        self.numbers = numbers

    def value(self, metric: str) -> float | None:
        value = self.numbers.get(metric)
        return None if value is None else float(np.mean(value))

    def curve(self, metric: str) -> dict[int, float]:
        return dict(enumerate(self.numbers.get(metric) or []))


Results = Mapping[str, Mapping[int, Result]]
"""Arm -> seed -> its run."""


def load_claims(path: Path) -> Claims:
    """Read a file of claims.

    Raises:
        RecipeError: an unknown key, or a wrong value; names its place.
    """
    try:
        return Claims.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: {error}") from None


def judge_row(row: Row, arm: str, results: Results) -> dict[str, Any]:
    """One arm of a row as numbers and a verdict."""
    both = {
        seed: (_read(row, run, results, seed), _baseline(row, results, seed))
        for seed, run in sorted(results.get(arm, {}).items())
    }
    seeds = [seed for seed, pair in both.items() if None not in pair]
    pairs = [(float(a), float(b)) for a, b in both.values() if a is not None and b is not None]
    tested = {"metric": row.metric, "read": row.read, "arm": arm, "against": row.against}
    if not pairs:
        return {**tested, "verdict": "not run", "seeds": []}
    difference = t_interval([value - base for value, base in pairs])
    low, high = (difference.low, difference.high) if len(pairs) > 1 else (None, None)
    mean, base_mean = (float(np.mean(column)) for column in zip(*pairs, strict=True))
    verdict = _verdict(row, difference, base_mean)
    if verdict == "reproduced" and row.at_most is not None and mean > row.at_most * base_mean:
        verdict = "sign only"
    return {
        **tested, "value": mean, "baseline": base_mean if row.against else None,
        "difference": difference.mean, "low": low, "high": high, "seeds": seeds,
        "verdict": verdict,
    }  # fmt: skip


def _baseline(row: Row, results: Results, seed: int) -> float | None:
    if not isinstance(row.against, str):
        return row.against
    run = results.get(row.against, {}).get(seed)
    return None if run is None else _read(row, run, results, seed)


def _read(row: Row, run: Result, results: Results, seed: int) -> float | None:
    if row.read == "end":
        return run.value(row.metric)
    curve = run.curve(row.metric)
    if row.read == "rmse":
        other = results.get(row.other_arm or "", {}).get(seed)
        base = other.curve(row.metric) if other else {}
        squares = [(curve[step] - base[step]) ** 2 for step in curve.keys() & base.keys()]
        return float(np.sqrt(np.mean(squares))) if squares else None
    values = [curve[step] for step in sorted(curve)]
    quarter = max(1, len(values) // 4)
    if len(values) < 2:
        return None
    end = float(np.mean(values[-quarter:]))
    return end if row.read == "quarter" else end - float(np.mean(values[:quarter]))


def _verdict(row: Row, difference: Interval, base_mean: float) -> Verdict:
    """``opposite`` is significant with the other sign; one seed has no interval, so it is never."""
    low, high = difference.low, difference.high
    if row.claim == "same":
        margin = row.margin * abs(base_mean)
        if -margin <= low and high <= margin:
            return "reproduced"
        return "sign only" if low <= 0 <= high else "not reproduced"
    sign = 1 if row.claim == "up" else -1
    low, high = sorted((sign * low, sign * high))
    if low > 0:
        return "reproduced"
    if high < 0:
        return "opposite"
    return "sign only" if sign * difference.mean > 0 else "not reproduced"


def judge(claims: Claims, results: Results) -> list[dict[str, Any]]:
    """Every row of every effect, in order."""
    return [
        {"effect": effect.number, "name": effect.name, "paper": effect.paper}
        | judge_row(row, arm, results)
        for effect in claims.effects
        for row in effect.rows
        for arm in ([row.arm] if isinstance(row.arm, str) else row.arm)
    ]


def table(tested: list[dict[str, Any]]) -> str:
    """The rows as Markdown; the first of an effect has its verdict in bold."""
    heads = "|effect|the paper|compared|baseline -> ours|difference [95 %]|seeds|reproduced"
    lines, last = [tuple(heads.split("|"))], None
    for row in tested:
        first, last = row["effect"] != last, row["effect"]
        head = (str(row["effect"]), row["name"], row["paper"]) if first else ("", "", "")
        lines.append((*head, *_cells(row, first)))
    return markdown(lines)


def _cells(row: dict[str, Any], first: bool) -> tuple[str, ...]:
    word = WORDS[row["verdict"]]
    word = f"**{word}**" if first and "**" not in word else word
    how = "" if row["read"] == "end" else f" ({row['read']})"
    compared = f"{row['metric']}{how}: {row['arm']} against {row['against']}"
    if not row["seeds"]:
        return compared, "–", "–", "–", word
    difference = f"{row['difference']:+.3g}"
    if row["low"] is not None:
        difference += f" [{row['low']:+.3g}, {row['high']:+.3g}]"
    if row["baseline"]:
        difference += f", {100 * row['difference'] / abs(row['baseline']):+.3g} %"
    values = f"{row['baseline'] or 0:.4g} -> {row['value']:.4g}"
    return compared, values, difference, str(len(row["seeds"])), word


def write(tested: list[dict[str, Any]], output: Path) -> str:
    """Write ``effects.md`` and ``effects.json`` into ``output``; return the table."""
    text = table(tested)
    write_atomic(output / "effects.md", text)
    write_atomic(output / "effects.json", json.dumps(tested, indent=1) + "\n")
    return text
