"""A recipe that cannot train is refused before weights load, with file, line and key."""

import json

import pytest

from tests.training.runs import refusals

ANSWERS = json.loads(refusals.FILE.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    refusals.write_inputs(folder)
    return folder


@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.usefixtures("no_installed_plugins")
def test_a_recipe_that_cannot_train_is_refused(case, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert refusals.answer(case) == ANSWERS[case]
