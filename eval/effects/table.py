"""The results on each effect: rows, and the table as Markdown, CSV and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.effects.claims import DIRECTIONS, EFFECTS
from eval.effects.comparisons import Comparison, Effect
from eval.effects.readings import Result
from eval.effects.shards import Shard
from eval.effects.verdicts import Verdict, verdict_of_no_change, verdict_of_sign
from moe_finetune.io import write_atomic
from moe_finetune.io.tables import csv_text
from moe_finetune.io.tables import markdown as pipe_table
from moe_finetune.metrics.statistics import Interval, t_interval

Results = Mapping[Shard, Result]
WORDS: Mapping[Verdict, str] = {
    "reproduced": "sign and significance",
    "sign only": "sign only",
    "not reproduced": "not",
    "opposite": "**opposite**, significant",
    "not run": "not run",
}


@dataclass(frozen=True)
class Row:
    """One comparison; ``difference`` and means are over the seeds that both arms have.

    ``excluded``: seeds without the number, such as diverged runs. ``relative``: whether the
    difference is relative to an arm's value.
    """

    what: str
    arm: str
    baseline: str | None
    arm_mean: float | None
    baseline_mean: float | None
    difference: Interval | None
    verdict: Verdict
    excluded: int = 0
    relative: bool = True


def compare(comparison: Comparison, results: Results) -> Row:
    """Evaluate one comparison on the existing runs."""
    what, arm, baseline = comparison.what, comparison.arm, comparison.baseline
    arms = _of(results, comparison.part, arm)
    bases = arms if baseline is None else _of(results, comparison.part, baseline)
    both = sorted(set(arms) & set(bases))
    pairs = [_pair(comparison, arms[seed], bases[seed]) for seed in both]
    complete = [(value, base) for value, base in pairs if value is not None and base is not None]
    excluded = len(pairs) - len(complete)
    if not complete:
        return Row(what, arm, baseline, None, None, None, "not run", excluded)
    difference = t_interval([value - base for value, base in complete])
    mean, base_mean = (float(np.mean(column)) for column in zip(*complete, strict=True))
    if comparison.sign == 0:
        verdict = verdict_of_no_change(difference, comparison.margin * abs(base_mean))
    else:
        verdict = verdict_of_sign(difference, comparison.sign)
        limit = comparison.at_most
        if verdict == "reproduced" and limit is not None and mean > limit * base_mean:
            verdict = "sign only"
    relative = baseline is not None and comparison.pair is None
    return Row(what, arm, baseline, mean, base_mean, difference, verdict, excluded, relative)


def _pair(comparison: Comparison, ours: Result, base: Result) -> tuple[float | None, float | None]:
    """The two numbers of one seed that are subtracted."""
    if comparison.pair is not None:
        return comparison.pair(ours, base), comparison.reference
    if comparison.baseline is None:
        return comparison.reading(ours), comparison.reference
    return comparison.reading(ours), comparison.reading(base)


def _of(results: Results, part: str, arm: str) -> dict[int, Result]:
    return {
        shard.seed: result
        for shard, result in results.items()
        if shard.part == part and shard.arm == arm
    }


def effect_rows(
    results: Results, upcycle: Sequence[Row] = (), effects: Sequence[Effect] = EFFECTS
) -> list[tuple[Effect, list[Row]]]:
    """Every effect with its rows; ``upcycle`` are those of effect 11, from another study."""
    return [
        (effect, [compare(c, results) for c in effect.comparisons] or list(upcycle))
        for effect in effects
    ]


def markdown(effects: Sequence[tuple[Effect, list[Row]]]) -> str:
    """The table of effects; an effect's verdict is that of its first row."""
    lines = [("", "effect", "the paper", "compared", "baseline -> ours", "difference [95 %]",
              "seeds", "reproduced")]  # fmt: skip
    for effect, rows in effects:
        if not rows:
            cells = ("–", "–", "–", "–", "not run: run the upcycle miniature first")
            lines.append((str(effect.number), effect.name, effect.paper, *cells))
        for position, row in enumerate(rows):
            first = position == 0
            head = (str(effect.number), effect.name, effect.paper) if first else ("", "", "")
            lines.append((*head, *_cells(row, bold=first)))
    return pipe_table(lines)


def directions_markdown(results: Results) -> str:
    """The table of each method's target metric."""
    lines = [("method", "metric", "baseline", "its value", "the method's", "difference [95 %]",
              "seeds", "as the paper says")]  # fmt: skip
    for comparison in DIRECTIONS:
        row = compare(comparison, results)
        if row.difference is None:
            continue
        assert row.arm_mean is not None and row.baseline_mean is not None
        moved = comparison.sign * row.difference.mean > 0
        answer = {
            "reproduced": "yes",
            "sign only": "yes, within noise" if row.difference.seeds > 1 else "yes",
            "opposite": "**no**, significantly",
        }.get(row.verdict, "**no**")
        limit = comparison.at_most
        if limit is not None and moved and row.arm_mean > limit * row.baseline_mean:
            answer = "lower, not 0"
        values = (_number(row.baseline_mean), _number(row.arm_mean), _interval(row.difference))
        seeds = str(row.difference.seeds)
        lines.append((row.arm, row.what, str(row.baseline), *values, seeds, answer))
    return pipe_table(lines)


def write_tables(
    effects: Sequence[tuple[Effect, list[Row]]], results: Results, output: Path
) -> None:
    """Write ``effects.md``, ``effects.csv``, ``effects.json`` and ``directions.md``."""
    write_atomic(output / "effects.md", markdown(effects))
    write_atomic(output / "directions.md", directions_markdown(results))
    listed = [
        {"effect": effect.number, "name": effect.name, "paper": effect.paper, **_flat(row)}
        for effect, rows in effects
        for row in rows
    ]
    write_atomic(output / "effects.json", json.dumps(listed, indent=1) + "\n")
    write_atomic(output / "effects.csv", csv_text(listed) if listed else "")


def _flat(row: Row) -> dict[str, Any]:
    values = asdict(row)
    difference = values.pop("difference") or {"mean": None, "low": None, "high": None, "seeds": 0}
    ends = {
        name: None if not np.isfinite(difference[name] or 0) else difference[name]
        for name in ("low", "high")
    }
    return {**values, "difference": difference["mean"], **ends, "seeds": difference["seeds"]}


def _cells(row: Row, bold: bool) -> tuple[str, ...]:
    against = f" against {row.baseline}" if row.baseline else ""
    compared = f"{row.what}: {row.arm}{against}"
    word = WORDS[row.verdict] + (f" ({row.excluded} without a value)" if row.excluded else "")
    if bold and row.verdict != "opposite":
        word = f"**{word}**"
    if row.difference is None or row.arm_mean is None or row.baseline_mean is None:
        return compared, "–", "–", "–", word
    values = f"{_number(row.baseline_mean)} -> {_number(row.arm_mean)}"
    difference = _interval(row.difference)
    if row.relative and row.baseline_mean:
        difference += f", {100 * row.difference.mean / abs(row.baseline_mean):+.3g} %"
    return compared, values, difference, str(row.difference.seeds), word


def _interval(difference: Interval) -> str:
    if difference.seeds == 1:
        return f"{difference.mean:+.3g}"
    return f"{difference.mean:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]"


def _number(value: float) -> str:
    return f"{value:.4g}"
