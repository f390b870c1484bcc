import pytest

from tests.checkpoint import helpers


@pytest.fixture(scope="session")
def bases(tiny_checkpoint):
    """family -> its tiny checkpoint."""
    return tiny_checkpoint


@pytest.fixture(scope="session")
def adapters(bases, tmp_path_factory):
    """family -> a random adapter on everything LoRA reaches, made once."""
    made = {}

    def get(family: str):
        if family not in made:
            folder = tmp_path_factory.mktemp("adapter") / "adapter"
            made[family] = helpers.adapter(bases(family), folder)
        return made[family]

    return get
