import copy

import pytest
import torch
from safetensors.torch import save_file

from tests.support import tiny
from tests.training.strength.strength import TERMS


@pytest.fixture
def terms(tmp_path):
    """Options of every term; one reads a table of its own."""
    path = tmp_path / "table.safetensors"
    save_file({"token_frequencies": torch.randn(tiny.VOCABULARY, 12).softmax(-1)}, path)
    return {**copy.deepcopy(TERMS), "supervised_routing": {"weight": 0.1, "table": str(path)}}
