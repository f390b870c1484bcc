"""An uninterrupted run to compare with."""

from pathlib import Path

import pytest

from tests.training.resume.harness import adapter_hash, logged, train, write_inputs


@pytest.fixture(scope="session")
def straight(warm_server, tmp_path_factory):
    """``straight(family)`` -> recipe file, hash and log of the run that nothing disturbed."""
    made: dict[str, tuple[Path, str, list[dict]]] = {}

    def get(family: str) -> tuple[Path, str, list[dict]]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            recipe = write_inputs(family, folder)
            child = train(recipe, folder / "straight")
            assert child.code == 0, child.text[-3000:]
            made[family] = (recipe, adapter_hash(folder / "straight"), logged(folder / "straight"))
        return made[family]

    return get
