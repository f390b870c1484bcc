"""The page that compares the arms: a study's table and pictures, and a report on the first seed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_finetune.report.context import Report, Section, folded, table
from moe_finetune.report.markup import Markup, join, tag
from moe_finetune.report.page import render_page
from moe_finetune.report.read_runs import Run, read_run
from moe_finetune.report.sections.curves import CURVES
from moe_finetune.report.sections.routing import ROUTING
from moe_finetune.report.sections.specialization import SPECIALIZATION
from moe_finetune.study.page import study_sections, table_markup
from moe_finetune.study.read_study import StudyResults
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
    """The page's HTML; the first of ``arms`` is the baseline of its pictures."""
    heads, *rows = clusters
    title = "Categories and tokens of each cluster (Tables 3 and 5)"
    sections = [
        Section("measures", "Measures", lambda _: tag("ul", [tag("li", note) for note in NOTES])),
        *study_sections(results, splits),
        Section("categories", "By category", lambda _: table_markup(categories)),
        Section("clusters", "Clusters", lambda _: table(title, [*heads], [[*row] for row in rows])),
        ROUTING,
        SPECIALIZATION,
        Section("curves", CURVES.title, lambda report: _curves(report, other_trainings)),
    ]
    return render_page(Report(arms, TITLE), sections)


def _curves(report: Report, other_trainings: list[Run]) -> Markup | None:
    others = Report(other_trainings, TITLE)
    title = "Dense model, experts and routers"
    parts = [CURVES.render(report), folded(title, CURVES.render(others))]
    return join(parts) if any(parts) else None
