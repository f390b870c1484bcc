"""Measure a run's experts on each rank: ``python -m tests.training.ranks.chosen_worker``."""

import sys
from pathlib import Path

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.training import ranks
from moe_finetune.training.before.prepare import prepare
from moe_finetune.training.run.chosen_experts import chosen_experts, training_rows


def main() -> None:
    recipe, folder = load_recipe(Path(sys.argv[1])), Path(sys.argv[2])
    ranks.join_group()
    folder.mkdir(exist_ok=True)
    inputs = prepare(recipe)
    model = load_model(inputs.start.folder, dtype="float32")
    rows = []
    model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["attention_mask"].sum().item()), with_kwargs=True
    )
    chosen = chosen_experts(model, inputs, RunFolder(folder), resumed=False)
    assert chosen is not None
    total = sum(len(row["input_ids"]) for row in training_rows(inputs))
    # Each rank reads its own part of the rows.
    assert 0 < sum(rows) <= total * (0.7 if ranks.world_size() > 1 else 1)
    (folder / f"{ranks.rank()}.txt").write_text(repr(sorted(chosen.items())))


if __name__ == "__main__":
    main()
