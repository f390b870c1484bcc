"""A recipe that cannot train is refused before weights load, with file, line and key."""

import json

import pytest

from tests.training import refusals

ANSWERS = json.loads(refusals.FILE.read_text())
CASES = {" ".join([text, *overrides]): (text, overrides, environment)
         for text, overrides, environment in refusals.cases()}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    refusals.write_inputs(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_that_cannot_train_is_refused(case, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert refusals.answer(*CASES[case]) == ANSWERS[case]


def test_every_answer_is_of_a_case():
    assert set(CASES) == set(ANSWERS)
