"""The page that compares the arms: a study's table and pictures, and a report on the first seed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.report.context import Report, Section, figure, folded, table
from moe_finetune.report.markup import Markup, join, tag
from moe_finetune.report.page import render_page
from moe_finetune.report.runs import Run, read_run
from moe_finetune.report.sections.curves import CURVES
from moe_finetune.report.sections.routing import ROUTING
from moe_finetune.report.sections.specialization import SPECIALIZATION
from moe_finetune.report.sections.text import COLORED, color_key, colored, largest_groups
from moe_finetune.study.page import study_sections, table_markup
from moe_finetune.study.results import StudyResults
from moe_finetune.study.table import Table
from moe_finetune.upcycle.results import CURVES as CURVES_FOLDER
from moe_finetune.upcycle.results import NOTES, measured_folder
from moe_finetune.upcycle.schema import UpcycleRecipe

TITLE = "From dense to a mixture of experts"


def read_arms(recipe: UpcycleRecipe, output: Path) -> list[Run]:
    """Each arm of the first seed as a run of the report: its routing on test, and its log."""
    seed = recipe.seeds[0]
    arms = []
    for name, arm in recipe.arms.items():
        label = arm.label or name
        measured = read_run(measured_folder(output, seed, name), label)
        log = read_run(output / CURVES_FOLDER / f"seed-{seed}.{name}", label)
        arms.append(replace(measured, curves=log.curves))
    return arms


def read_other_trainings(recipe: UpcycleRecipe, output: Path) -> list[Run]:
    """The logs of the trainings before the first seed's arms: dense model, experts and routers."""
    seed = f"seed-{recipe.seeds[0]}"
    experts = [f"{seed}.expert-{expert}" for expert in range(recipe.clusters.count)]
    folders = [output / CURVES_FOLDER / name for name in ("dense", *experts, f"{seed}.router")]
    return [
        read_run(folder, folder.name.removeprefix(f"{seed}."))
        for folder in folders
        if folder.is_dir()
    ]


def render(
    arms: list[Run],
    other_trainings: list[Run],
    results: StudyResults,
    splits: Table,
    categories: Table,
    clusters: Sequence[Sequence[str]],
) -> str:
    """Return the page's HTML.

    Args:
        arms: from :func:`read_arms`; the first is the baseline of the pictures.
        other_trainings: from :func:`read_other_trainings`.
        results: the results behind ``splits``.
        splits: the table over all texts.
        categories: the table by category.
        clusters: categories and tokens of each cluster, headings first.
    """
    heads, *rows = clusters
    title = "Categories and tokens of each cluster (Tables 3 and 5)"
    sections = [
        Section("measures", "Measures", lambda _: tag("ul", [tag("li", note) for note in NOTES])),
        *study_sections(results, splits),
        Section("categories", "By category", lambda _: table_markup(categories)),
        Section("clusters", "Clusters", lambda _: table(title, [*heads], [[*r] for r in rows])),
        ROUTING,
        Section("frequency", "Text by token frequency", _frequent),
        SPECIALIZATION,
        Section("curves", CURVES.title, lambda report: _curves(report, other_trainings)),
    ]
    return render_page(Report(arms, TITLE), sections)


def _curves(report: Report, other_trainings: list[Run]) -> Markup | None:
    others = Report(other_trainings, TITLE)
    title = "Dense model, experts and routers"
    parts = [CURVES.render(report), folded(title, CURVES.render(others))]
    return join(parts) if any(parts) else None


def _frequent(report: Report) -> Markup | None:
    """Figure 1c: test texts, tokens in the color of the expert whose texts have them most often."""
    passages: dict[str, list[dict[str, Any]]] = {
        run.label: texts
        for run in report.runs
        if run.routing_after is not None and (texts := run.routing_after.data.get("colored_text"))
    }
    if not passages:
        return None
    first = next(iter(passages.values()))
    frequent = [{**passage, "experts": passage["frequent"]} for passage in first]
    counted = [expert for passage in frequent for expert in passage["experts"] if expert >= 0]
    colors = largest_groups(counted, COLORED)
    shares = []
    for label, texts in passages.items():
        agree = [
            chosen == most
            for passage in texts
            for chosen, most in zip(passage["experts"], passage["frequent"], strict=True)
            if most >= 0
        ]
        shares.append(f"{label} {100 * float(np.mean(agree)):.0f}")
    title = (
        "Tokens in the color of the expert whose training texts have them most often (Figure 1c); "
        f"the first choice of layer {first[0]['layer']} is that expert for, in %: "
        f"{', '.join(shares)}"
    )
    note = (
        "The same texts in the colors of the chosen experts (Figures 1a and 1b) are further down. "
        "The paper shows one text and layer 16; evaluation.passage_layer chooses another layer."
    )
    text = tag("div", colored(frequent, colors), class_="panels broad")
    return figure(title, color_key(colors), text, note=note, wide=True)
