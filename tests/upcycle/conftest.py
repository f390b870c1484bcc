import shutil

import pytest

from moe_finetune import cli
from tests.upcycle.small import write_recipe


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished upcycle: its recipe and its folder; do not change them."""
    folder = tmp_path_factory.mktemp("upcycle")
    recipe = write_recipe(folder)
    assert cli.main(["upcycle", str(recipe), "--output", str(folder / "run")]) == 0
    return recipe, folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy that a test may change."""
    recipe, output = finished
    shutil.copytree(output, tmp_path / "run")
    return recipe, tmp_path / "run"
