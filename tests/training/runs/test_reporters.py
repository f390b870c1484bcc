"""What ``trainer.report_to`` writes has the losses and the routing of the method."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_finetune.io.rows import write_jsonl
from moe_finetune.io.run_folder import read_log
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import run_recipe


def test_tensorboard_has_every_number_of_the_log(tiny_checkpoint, tmp_path):
    rows = [{"text": f"{word} " * (5 + n)} for n, word in enumerate(["ab", "cde", "f", "ghi"])]
    write_jsonl(tmp_path / "train.jsonl", rows)
    tree = {
        "model": {"path": str(tiny_checkpoint("qwen3_moe")), "dtype": "float32"},
        "method": {"preset": "orthogonal_variance"},
        "lora": {"rank": 3, "alpha": 6},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_length": 33, "packing": False},
        "trainer": {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1},
        "export": {"merge": False},
    }
    run = run_recipe(recipe_from_tree(Tree(tree)), tmp_path / "run")
    (folder,) = (run / "checkpoints" / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    shown = {
        tag.removeprefix("train/"): {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
    logged = {row["step"]: row for row in read_log(run / "metrics.jsonl") if "loss" in row}
    assert sorted(logged) == [1, 2, 3]
    ours = {name for row in logged.values() for name in row if name.partition("/")[2]}
    assert {"losses/orthogonality", "losses/variance"} <= ours
    assert {name for name in ours if name.startswith("routing/")}
    for name in ours:
        values = {step: row[name] for step, row in logged.items() if name in row}
        assert shown[name] == pytest.approx(values, rel=1e-5), name
