"""The steps of a run that are not a module of their own."""

from __future__ import annotations

import pytest
import torch

from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.tree import Tree
from moe_finetune.training.start import start_model


@pytest.mark.parametrize(
    ("lora", "dtype"), [(None, torch.float32), ({"rank": 3, "alpha": 6}, torch.bfloat16)]
)
def test_weights_that_train_are_float32(lora, dtype, tiny_checkpoint):
    tree = {
        "model": {"path": str(tiny_checkpoint("qwen3_moe")), "dtype": "bfloat16"},
        "method": {"preset": "none"},
        "lora": lora,
        "data": {"train": "a.jsonl"},
    }
    model = start_model(recipe_from_tree(Tree(tree)))
    assert {p.dtype for p in model.parameters()} == {dtype}
