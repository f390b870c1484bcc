"""Recipes of short runs."""

from pathlib import Path
from typing import Any

from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree, merge_mappings


def recipe_of(base: Path, rows: Path | str, /, **sections: Any) -> Recipe:
    """Two steps on a file of rows without a method; ``sections`` are laid over it."""
    tree = {
        "model": {"path": str(base), "dtype": "float32"},
        "method": {"preset": "none"},
        "lora": {"rank": 3, "alpha": 6},
        "data": {"train": str(rows), "max_length": 33},
        "trainer": {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": []},
    }
    return recipe_from_tree(Tree(merge_mappings(tree, sections)))
