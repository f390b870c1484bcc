"""Recipes side by side, differences first; then versions, hardware and evaluations likewise."""

import math
from collections.abc import Iterable
from typing import Any

from moe_finetune.recipe.section_base import SECRET
from moe_finetune.report.context import Cell, Report, Section, group, table
from moe_finetune.report.markup import DASH, Markup, is_number, join, number, tag

MANY = 8  # longer lists of numbers show only their ends


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys; lists of plain values stay whole."""
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for name, inner in value.items():
            flat |= flatten(inner, f"{prefix}.{name}" if prefix else str(name))
        return flat
    if isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        flat = {}
        for index, inner in enumerate(value):
            flat |= flatten(inner, f"{prefix}.{index}")
        return flat
    return {prefix: value}


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a copy in which values of keys that name a secret are hidden."""
    if isinstance(value, dict):
        return {k: without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [without_secrets(v, name) for v in value]
    return "(hidden)" if value not in (None, "") and SECRET.search(name) else value


def value_text(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}".replace("-", "−") if math.isfinite(value) else number(value)
    if isinstance(value, list) and len(value) > MANY and all(map(is_number, value)):
        return f"{len(value)} numbers from {number(min(value))} to {number(max(value))}"
    if isinstance(value, (list, dict)):
        return ", ".join(map(value_text, value)) if value else DASH
    return str(value)


def different_keys(recipes: Iterable[dict[str, Any]]) -> list[str]:
    """The dotted keys in which recipes differ, in their order."""
    flats = [flatten(recipe) for recipe in recipes if recipe]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return [k for k in keys if len({value_text(flat.get(k)) for flat in flats}) > 1]


def side_by_side(report: Report, caption: str, sources: list[dict[str, Any]]) -> Markup:
    """Return a table of dotted keys, one column per run; rows that differ come first, marked."""
    flats = [flatten(without_secrets(source)) if source else {} for source in sources]
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    texts = {key: [value_text(flat.get(key)) for flat in flats] for key in keys}
    different = [key for key in keys if len(set(texts[key])) > 1]
    ordered = different + [key for key in keys if key not in different]
    columns: list[Cell] = ["Key", *(report.swatch(run) for run in report.runs)]
    rows: list[list[Cell]] = [[tag("code", key), *texts[key]] for key in ordered]
    classes = ["differs" if key in different else "same" for key in ordered]
    grid = table(caption, columns, rows, row_classes=classes)
    if len(report.runs) == 1 or not different or len(different) == len(keys):
        return grid
    words = f"Show only what differs ({len(different)} of {len(keys)})"
    box = tag("label", tag("input", type="checkbox", class_="only-different"), words)
    return tag("div", box, grid, class_="settings")


def _render(report: Report) -> Markup | None:
    if not any(run.recipe for run in report.runs):
        report.note_missing("Settings", "no recipe.yaml in the run's folder")
        return None
    recipes = [run.recipe for run in report.runs]
    parts = [side_by_side(report, "Resolved recipes", recipes)]
    summaries = [run.summary for run in report.runs]
    if any(summaries):
        parts.append(group("Summary", side_by_side(report, "Summaries of the runs", summaries)))
    return join(parts)


SETTINGS = Section("settings", "Settings", _render)


def _environment(report: Report) -> Markup | None:
    parts = []
    if any(run.environment for run in report.runs):
        sources = [run.environment for run in report.runs]
        parts.append(side_by_side(report, "Versions, hardware and times", sources))
    else:
        report.note_missing("Environment", "no environment.json in the run's folder")
    if any(run.evaluation for run in report.runs):
        # the scores section shows remarks and unfinished tasks
        sources = [
            {k: v for k, v in run.evaluation.items() if k not in ("notes", "unfinished")}
            for run in report.runs
        ]
        grid = side_by_side(report, "How the runs were evaluated", sources)
        parts.append(group("Evaluation", grid))
    return join(parts) if parts else None


ENVIRONMENT = Section("environment", "Environment", _environment)
