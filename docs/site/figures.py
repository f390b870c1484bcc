"""Figures of the examples in ``recipes/papers``, taken from saved results.

``<!-- demo: ARM -->`` begins a table of what an arm changed at the demo's length,
``<!-- effects: NAME: 1 2 14/ARM -->`` one of effects of a study, ``<!-- cost: NAME -->`` one of a
step's time and memory by arm; ``<!-- end of figures -->`` ends it.
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
PAGES = sorted((ROOT / "recipes" / "papers").glob("*.md"))
TABLE = re.compile(r"(<!-- (demo|effects|cost): (.+?) -->\n).*?(<!-- end of figures -->)", re.S)


def result(name: str) -> dict[str, Any]:
    """A saved result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


def demo_rows(arm: str) -> Iterator[str]:
    """What an arm changed: on the demo's held-out rows, and on fresh ones."""
    compared = result("demo_strength")["arms"][arm]["compared"]
    # The baseline's balance weighs 0.001 and the arm's more, so that balance is not compared.
    yield "| number | balance, 0.001 | with the losses | times | on fresh rows, times |"
    yield "| --- | --- | --- | --- | --- |"
    for name, row in compared.items():
        if not name.startswith("fresh/") and name != "max_violation":
            fresh = compared[f"fresh/{name}"]["times"]
            shown = [row["baseline"], row["ours"], row["times"], fresh]
            yield f"| {name.replace('_', ' ')} | {' | '.join(map(number, shown))} |"


def effect_rows(asked: str) -> Iterator[str]:
    """Effects of a study: the first row of each, or that of an arm."""
    name, _, effects = asked.partition(": ")
    rows = [row for study in result(name)["studies"].values() for row in study["effects"]]
    yield "| effect | measured | compared | baseline -> ours | difference [95 %] | reproduced |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for effect in effects.split():
        number_of, _, arm = effect.partition("/")
        row = next(
            row for row in rows if row["effect"] == int(number_of) and arm in ("", row["arm"])
        )
        means = f"{number(row['baseline_mean'])} -> {number(row['arm_mean'])}"
        spread = f"{row['difference']:+.3g} [{row['low']:+.3g}, {row['high']:+.3g}]"
        against = f" against {row['baseline']}" if row["baseline"] else ""
        yield (
            f"| {number_of}: {row['name']} | {row['what']} | {row['arm']}{against} | {means} "
            f"| {spread} | {row['verdict']} |"
        )


def cost_rows(name: str) -> Iterator[str]:
    """A step's time and peak memory by arm, as multiples of the first."""
    yield "| model | weights, million | time of a step | peak memory |"
    yield "| --- | --- | --- | --- |"
    for arm, row in result(name)["arms"].items():
        weights = number(row["weights"] / 1e6)
        yield f"| {arm} | {weights} | {number(row['time'])} | {number(row['memory'])} |"


def written(text: str) -> str:
    """A page with its tables made anew."""
    makers = {"demo": demo_rows, "effects": effect_rows, "cost": cost_rows}
    return TABLE.sub(lambda m: m[1] + "\n".join(makers[m[2]](m[3])) + "\n" + m[4], text)


def main() -> None:
    """Write all tables."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
