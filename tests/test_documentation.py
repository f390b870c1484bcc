"""What the pages say exists: verbs, families, keys, figures, links, messages."""

import jsonschema
import pytest
import yaml

from moe_finetune import cli
from moe_finetune.models import FAMILIES
from tests.conftest import ROOT
from tests.support import documents
from tests.support.documents import script

VERBS = {command.name or command.callback.__name__ for command in cli.app.registered_commands}


def test_the_table_of_verbs_has_every_verb_and_no_other():
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    rows = text.partition("| verb | does |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    assert {row.split("|")[1].strip(" `") for row in rows} == VERBS


def test_the_tables_of_models_are_current():
    families = script("families")
    made = families.tables()
    if made is None:
        pytest.skip("vLLM is not installed: its registry is part of the tables")
    for page, table in made.items():
        text = page.read_text(encoding="utf-8")
        written = text.partition(families.START)[2].partition(families.END)[0]
        assert written == table, "run `make families`"
    assert made[families.MODELS].count("| tested |") >= 12


def test_every_model_type_is_named():
    text = script("families").MODELS.read_text(encoding="utf-8")
    assert not [f.model_type for f in FAMILIES.values() if f"| `{f.model_type}`" not in text]


def test_the_tables_of_keys_are_current():
    keys = script("keys")
    old = [
        name for name in keys.TABLES if keys.written(name) != (keys.REFERENCE / name).read_text()
    ]
    assert not old, f"run `make tables`: {', '.join(old)}"


def test_the_schema_of_recipes_is_current_and_takes_what_is_shipped():
    schema = script("schema")
    assert schema.FILE.read_text(encoding="utf-8") == schema.text(), "run `make tables`"
    check = jsonschema.Draft202012Validator(schema.schema()).is_valid
    folders = ("", "models", "methods", "data", "training", "stages", "demo")
    files = [f for name in folders for f in (ROOT / "recipes" / name).glob("*.yaml")]
    assert len(files) > 40
    assert [f.name for f in files if not check(yaml.safe_load(f.read_text()))] == []
    for wrong in (
        {"modle": {}},
        {"lora": {"rank": "many"}},
        {"data": {"max_length": 1}},
        {"trainer": {"learning_rat": 1e-4}},
        {"method": {"terms": {"erc": {"alhpa": 1}}}},
    ):
        assert not check(wrong), wrong


def test_the_examples_figures_are_the_saved_ones():
    figures = script("figures")
    texts = {page: page.read_text(encoding="utf-8") for page in figures.PAGES}
    assert len(texts) == 7
    old = [page.name for page, text in texts.items() if figures.written(text) != text]
    assert not old, f"run `make tables`: {', '.join(old)}"


def test_the_pictures_of_metrics_are_current():
    pictures = dict(script("pictures").files())
    assert len(pictures) == 8
    old = [path.name for path, content in pictures.items() if path.read_text() != content]
    assert not old, f"run `make tables`: {', '.join(old)}"


def test_llms_txt_has_the_first_sentence_of_every_page():
    """It began in the middle of a sentence where a page's first line starts with a name in code."""
    pages = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())["nav"]
    lines = [line for line in script("llms").text(pages).splitlines() if line.startswith("- [")]
    assert len(lines) == len([*(ROOT / "docs").rglob("*.md")])
    for line in lines:
        title, _, rest = line.removeprefix("- [").partition("](")
        address, _, sentence = rest.partition("): ")
        assert title and (ROOT / "docs" / address).with_suffix(".md").is_file()
        if sentence:
            first = sentence.lstrip("`*")[0]
            assert first.isupper() or sentence.startswith(("`", "**")), line
            assert sentence[-1] in ".:?*" and sentence.count("`") % 2 == 0, line
    assert sum("): " in line for line in lines) >= len(lines) - 1  # the glossary is a table


def test_links_lead_somewhere():
    dead = []
    for page in documents.pages():
        text = documents.FENCE.sub("", page.read_text(encoding="utf-8"))
        for name, anchor in documents.LINK.findall(text):
            target = (page.parent / name).resolve() if name else page
            if not target.is_file():  # the site has no page for a folder
                dead.append(f"{page.name}: {name}")
            elif anchor and anchor not in documents.anchors(target):
                dead.append(f"{page.name}: {name}#{anchor}")
    assert not dead


def test_every_page_of_the_site_is_in_its_navigation():
    config = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    assert not [page for page in pages if f"- {page}\n" not in config]


def test_the_callback_and_the_context_manager_are_both_shown():
    text = (ROOT / "README.md").read_text().partition("## Inside your own trainer")[2]
    text = text.partition("\n## ")[0]
    assert "SpecializationCallback(" in text and "with Specialization(model" in text
