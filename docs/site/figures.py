"""Figures of the pages in ``recipes``, from saved results.

``<!-- demo: ARM -->`` begins a table of what an arm changed at the demo's length, over seeds,
``<!-- arms: NAME -->`` one of what every arm of a study ended with,
``<!-- effects: NAME: 1 2 14/ARM -->`` one of effects of a study;
``<!-- end of figures -->`` ends it.
``python docs/site/figures.py`` (``make tables``) writes them; a test asks that they are current.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "bench" / "results"
PAGES = [
    *(ROOT / "recipes" / name for name in ("README.md", "studies/README.md")),
    *sorted((ROOT / "recipes" / "papers").glob("*.md")),
]
TABLE = re.compile(r"(<!-- (demo|arms|effects): (.+?) -->\n).*?(<!-- end of figures -->)", re.S)


def result(name: str) -> dict[str, Any]:
    """A saved result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


def demo_rows(arm: str) -> Iterator[str]:
    """What an arm changed on fresh rows, against each baseline."""
    yield "| number | against | baseline | with the losses | times | difference [95 %] | seeds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in result("demo_strength")["studies"]["demo_strength"]["effects"]:
        if row["arm"] != arm or row["difference"] is None:
            continue
        means = [row["baseline_mean"], row["arm_mean"], row["arm_mean"] / row["baseline_mean"]]
        spread = f"{row['difference']:+.3g}"
        if row["seeds"] > 1:
            spread += f" [{row['low']:+.3g}, {row['high']:+.3g}]"
        yield (
            f"| {row['what']} | {row['baseline']} | {' | '.join(map(number, means))} | {spread} "
            f"| {row['seeds']} |"
        )


ARM_METRICS = {
    "expert_overlap": "overlap",
    "score_variance": "score variance",
    "max_violation": "MaxVio",
    "validation_loss": "held-out loss",
    "activation_cosine": "activation cosine",
    "coupling_mass": "coupling mass",
    "erc_loss": "ERC loss",
    "sums": "sums, %",
}


def arm_rows(name: str) -> Iterator[str]:
    """What each arm of a study ended with: means over seeds."""
    yield f"| arm | {' | '.join(ARM_METRICS.values())} | seeds |"
    yield "| --- |" + " --- |" * (len(ARM_METRICS) + 1)
    for arm, values in result(name)["studies"][name]["arms"].items():
        cells = [f"{values[metric]:.4g}" for metric in ARM_METRICS]
        yield f"| `{arm.removeprefix('finetune/')}` | {' | '.join(cells)} | {values['seeds']} |"


def effect_rows(spec: str) -> Iterator[str]:
    """Effects of a study: the first row of each, or that of an arm, or ``all``."""
    name, _, effects = spec.partition(": ")
    rows = [row for study in result(name)["studies"].values() for row in study["effects"]]
    yield "| effect | measured | compared | baseline -> ours | difference [95 %] | reproduced |"
    yield "| --- | --- | --- | --- | --- | --- |"
    if effects == "all":
        yield from (_effect(row) for row in rows if row["difference"] is not None)
        return
    for effect in effects.split():
        number_of, _, arm = effect.partition("/")
        yield _effect(
            next(row for row in rows if row["effect"] == int(number_of) and arm in ("", row["arm"]))
        )


def _effect(row: dict[str, Any]) -> str:
    means = f"{number(row['baseline_mean'])} -> {number(row['arm_mean'])}"
    spread = f"{row['difference']:+.3g}"
    if row["seeds"] > 1:
        spread += f" [{row['low']:+.3g}, {row['high']:+.3g}]"
    against = f" against {row['baseline']}" if row["baseline"] else ""
    head = f"| {row['effect'] or '-'}: {row['name']} | {row['what']} | {row['arm']}{against}"
    return f"{head} | {means} | {spread} | {row['verdict']} |"


def written(text: str) -> str:
    """A page with its tables made anew."""
    makers = {"demo": demo_rows, "arms": arm_rows, "effects": effect_rows}
    return TABLE.sub(lambda m: m[1] + "\n".join(makers[m[2]](m[3])) + "\n" + m[4], text)


def main() -> None:
    """Write all tables."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
