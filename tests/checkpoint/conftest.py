import shutil

import pytest

from tests.checkpoint import helpers
from tests.support import tiny


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


@pytest.fixture
def base(tmp_path):
    """A sharded qwen3_moe checkpoint of this test's own."""
    folder = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe").save_pretrained(folder, max_shard_size="900KB")
    return folder


@pytest.fixture
def adapter(adapters, tmp_path):
    """A copy of the adapter on everything LoRA reaches, to damage."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapters("qwen3_moe"), folder)
    return folder
