"""README and recipes/README.md name every verb and every key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from moe_finetune import cli
from moe_finetune.experiments.recipe import StudyRecipe
from moe_finetune.models import FAMILIES
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.validation import _models
from tests import support_table

ROOT = Path(__file__).resolve().parents[1]
VERBS = {command.name or command.callback.__name__ for command in cli.app.registered_commands}


def table(text: str, heading: str) -> dict[str, str]:
    """First cell -> the rest of the row, of the table that follows ``heading``."""
    rows = text.partition(heading)[2].partition("| --- |")[2].partition("\n\n")[0].splitlines()[1:]
    return {row.split("|")[1].strip(): "|".join(row.split("|")[2:]) for row in rows}


def test_the_table_of_verbs_has_every_verb_and_no_other():
    found = table((ROOT / "README.md").read_text(), "## Command line")
    assert {cell.strip("`") for cell in found} == VERBS


def test_the_table_of_families_is_current():
    made = support_table.table()
    if made is None:
        pytest.skip("vLLM is not installed: its registry is part of the table")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written = text.partition(support_table.START)[2].partition(support_table.END)[0]
    assert written == made, "run `make families`"
    assert written.count("| tested |") >= 12


def test_every_family_is_named():
    text = (ROOT / "README.md").read_text()
    assert not [name for name in FAMILIES if f"`{name}`" not in text]


@pytest.mark.parametrize(
    ("model", "heading"),
    [(Recipe, "## Every key"), (StudyRecipe, "A study file has keys of its own:")],
)
def test_every_key_is_listed(model, heading):
    found = table((ROOT / "recipes" / "README.md").read_text(), heading)
    for key, field in model.model_fields.items():
        rows = [cell + text for cell, text in found.items() if f"`{key}`" in cell + text]
        assert rows, f"{heading} lacks {key}"
        own = next((text for cell, text in found.items() if f"`{key}`" in cell), "")
        for section in sections(field.annotation):
            lacking = [name for name in section.model_fields if name not in own]
            assert not lacking, f"{heading}: {key} lacks {lacking}"


def sections(annotation: object) -> list[type[BaseModel]]:
    return list(_models(annotation))


def test_the_callback_and_the_context_manager_are_both_shown():
    text = (ROOT / "README.md").read_text().partition("## Inside your own trainer")[2]
    text = text.partition("\n## ")[0]
    assert "SpecializationCallback(" in text and "with Specialization(model" in text
