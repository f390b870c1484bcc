"""What ``trainer.report_to`` writes has the losses and the routing of the method, also offline."""

import json

import pytest

from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import read_log
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import run_recipe


def tensorboard(run, _):
    """Each value by tag and step, from TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (run / "checkpoints" / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag.removeprefix("train/"): {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def records_of(content):
    """The records of a log of blocks, as LevelDB writes it, after W&B's header of seven bytes."""
    at, parts = 7, []
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # too short for another head
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def wandb(_, folder):
    """The same from W&B's file of an offline run."""
    import wandb as library
    from wandb.proto.wandb_internal_pb2 import Record

    library.finish()
    library.teardown()  # ``finish`` returns before the file has all: its writer has to have ended
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    shown = {}
    for data in records_of(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        row = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for key, value in row.items():
            step = row.get("train/global_step")
            shown.setdefault(key.removeprefix("train/"), {})[step] = value
    return shown


def trackio(_, __):
    """The same from trackio's database."""
    from trackio.sqlite_storage import SQLiteStorage

    (project,) = SQLiteStorage.get_projects()
    (name,) = SQLiteStorage.get_runs(project)
    shown = {}
    for row in SQLiteStorage.get_logs(project, name):
        for key, value in row.items():
            step = row.get("train/global_step")
            shown.setdefault(key.removeprefix("train/"), {})[step] = value
    return shown


@pytest.mark.parametrize("read", [tensorboard, wandb, trackio], ids=lambda read: read.__name__)
def test_a_reporter_has_every_number_of_the_log(tiny_checkpoint, tmp_path, monkeypatch, read):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    if read is trackio:  # it reads its folder's variable when it is imported
        for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    rows = [{"text": f"{word} " * (5 + n)} for n, word in enumerate(["ab", "cde", "f", "ghi"])]
    write_jsonl(tmp_path / "train.jsonl", rows)
    trainer = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1}
    tree = {
        "model": {"path": str(tiny_checkpoint("qwen3_moe")), "dtype": "float32"},
        "method": {"preset": "orthogonal_variance"},
        "lora": {"rank": 3, "alpha": 6},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_length": 33, "packing": False},
        "trainer": {**trainer, "report_to": read.__name__},
        "export": {"merge": False},
    }
    run = run_recipe(recipe_from_tree(Tree(tree)), tmp_path / "run")
    shown = read(run, tmp_path)
    logged = {row["step"]: row for row in read_log(run / "metrics.jsonl") if "loss" in row}
    assert sorted(logged) == [1, 2, 3]
    ours = {name for row in logged.values() for name in row if name.partition("/")[2]}
    assert {"losses/orthogonality", "losses/variance"} <= ours
    assert {name for name in ours if name.startswith("routing/")}
    for name in ours:
        values = {step: row[name] for step, row in logged.items() if name in row}
        found = {step: value for step, value in shown[name].items() if step in values}
        assert found == pytest.approx(values, rel=1e-5), name
