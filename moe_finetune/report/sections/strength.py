"""The strength of the losses: gradient norms relative to the trainer's loss, last measured."""

import math
from collections.abc import Iterator

from moe_finetune.report.context import Cell, Report, Section, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.read_runs import Run


def _render(report: Report) -> Markup | None:
    rows: list[list[Cell]] = []
    for run in report.runs:
        for term in _terms(run):
            values = {key: _last(run, f"strength/{term}/{key}") for key in _COLUMNS}
            cells: list[Cell] = [join([report.swatch(run), f" {term.replace('_', ' ')}"])]
            for key, value in values.items():
                share = key.startswith("share")
                cells.append(_share(value) if share else number(value))
            rows.append(cells)
    if not rows:
        return None
    intro = (
        "The norm of each loss's gradient in percent of that of the trainer's loss, on the same "
        "parameters: below 1\u00a0% hardly anything shows, above 100\u00a0% it drowns it. "
        "Cosine: between the two gradients."
    )
    caption = "Strength of each loss when it was last measured"
    return join([tag("p", intro, class_="intro"), table(caption, ["Loss", *_HEADS], rows)])


_COLUMNS = ("weight", "share_router", "share_experts", "cosine_router", "cosine_experts",
            "weight_for_10_percent")  # fmt: skip
_HEADS = ("Weight", "Routers", "Experts", "Cosine, routers", "Cosine, experts", "Weight for 10 %")


def _terms(run: Run) -> Iterator[str]:
    for name in run.curves:
        if name.startswith("strength/") and name.endswith("/weight"):
            yield name.split("/")[1]


def _last(run: Run, name: str) -> float:
    curve = run.curves.get(name)
    return curve.values[-1] if curve and curve.values else math.nan


def _share(value: float) -> str:
    return DASH if not math.isfinite(value) else f"{number(100 * value, 2)}\u00a0%"


STRENGTH = Section("strength", "Strength", _render)
