"""The checkpoint folder: appears whole, says when it is damaged, and is never the last to go."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerState

from moe_finetune.errors import CheckpointError
from moe_finetune.io import write_small
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.training.run_log import RunLog
from moe_finetune.training.save_and_resume.resumable_trainer import find_checkpoint
from moe_finetune.training.save_and_resume.state_files import (
    accumulation,
    pack_rank,
    rank_file,
    read_rank,
)
from moe_finetune.training.save_and_resume.training_state import (
    FORMAT,
    MANIFEST,
    OtherFormatError,
    checkpoints,
    newest_checkpoint,
    rotate,
    verify_checkpoint,
    write_manifest,
)

PARTS = [
    lambda folder: write_small(folder, "one.bin", b"first" * 11),
    lambda folder: write_small(folder, "two.json", b'{"second": 2}'),
]


def made(root, step):
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for write in PARTS:
        write(folder)
    write_manifest(folder)
    return folder


def test_what_is_written_verifies(tmp_path):
    folder = made(tmp_path, 3)
    verify_checkpoint(folder)
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "one.bin", "two.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_files_of_safetensors_can_be_read_by_others(tmp_path):
    target = tmp_path / "checkpoint-3"
    target.mkdir()
    save_file({"w": torch.ones(3)}, target / "w.safetensors")
    write_manifest(target)
    usual = tmp_path / "usual"
    usual.touch()
    assert (target / "w.safetensors").stat().st_mode == usual.stat().st_mode


FILES = ("one.bin", "two.json", MANIFEST)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "bit flipped"])
@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_seen_and_the_older_one_taken(tmp_path, name, damage):
    older, newer = made(tmp_path, 9), made(tmp_path, 10)
    file = newer / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "bit flipped":
        for place in range(len(content)):  # anywhere in the file, spaces of the manifest apart
            flipped = bytearray(content)
            flipped[place] ^= 1 << (place % 8)
            file.write_bytes(flipped)
            try:
                same = json.loads(flipped) == json.loads(content) if name == MANIFEST else False
            except ValueError:
                same = False
            if not same:
                with pytest.raises(CheckpointError, match="checkpoint-10"):
                    verify_checkpoint(newer)
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    found, problems = newest_checkpoint(tmp_path)
    assert found == older
    assert len(problems) == 1 and "checkpoint-10" in problems[0]


def test_order_is_by_number_and_other_folders_do_not_count(tmp_path):
    for step in (9, 10, 100):
        made(tmp_path, step)
    for name in ("checkpoint-x", "checkpoint-", ".checkpoint-200.partial-0123abcd", "other"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (100, 10, 9)]


def test_without_a_manifest_a_folder_does_not_count(tmp_path):
    good, unfinished = made(tmp_path, 1), made(tmp_path, 2)
    (unfinished / MANIFEST).unlink()
    found, problems = newest_checkpoint(tmp_path)
    assert found == good and "its save did not finish" in problems[0]


def test_a_file_that_another_node_wrote_must_be_visible(tmp_path):
    folder = made(tmp_path, 1)
    (folder / MANIFEST).unlink()
    with pytest.raises(OSError, match=r"shards/x was written .*that all nodes share"):
        write_manifest(folder, {"shards/x": {"bytes": 1, "sha256": ""}})
    assert newest_checkpoint(tmp_path)[0] is None


def test_a_checkpoint_of_another_version_is_refused_not_skipped(tmp_path):
    made(tmp_path, 1)
    manifest = made(tmp_path, 2) / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    with pytest.raises(OtherFormatError, match=r"checkpoint-2: another version .*new run"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="another version"):
        find_checkpoint(tmp_path)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 4):
        made(tmp_path, step)
    assert rotate(tmp_path, None) == []
    rotate(tmp_path, 2, best=tmp_path / "checkpoint-1")
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-1"]
    rotate(tmp_path, 1, best=tmp_path / "checkpoint-1")
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-1"]


def test_rotation_never_removes_the_only_whole_one(tmp_path):
    for step in (1, 2, 3):
        made(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}" / "one.bin").write_bytes(b"damaged" * 7 + b"......")
    assert rotate(tmp_path, 1) == []
    made(tmp_path, 4)
    (tmp_path / "checkpoint-4" / "one.bin").unlink()
    assert rotate(tmp_path, 1) == []
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-1"


def test_a_damaged_one_takes_no_place_of_a_good_one(tmp_path):
    for step in (1, 2, 3):
        made(tmp_path, step)
    (tmp_path / "checkpoint-2" / "one.bin").unlink()
    rotate(tmp_path, 2)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = made(tmp_path, 5)
    (folder / "one.bin").unlink()
    made(tmp_path, 5)
    verify_checkpoint(folder)


def test_other_numbers_of_ranks_take_a_rank_each(tmp_path):
    args = SimpleNamespace(
        world_size=2, train_batch_size=3, gradient_accumulation_steps=4, process_index=0
    )
    for rank in range(2):
        write_small(tmp_path, rank_file(rank), pack_rank(args, tokens=rank))
    assert [read_rank(tmp_path, rank)["tokens"] for rank in range(4)] == [0, 1, 0, 1]
    args.world_size = 4
    assert accumulation(tmp_path, args) == 2
    args.world_size = 5
    with pytest.raises(CheckpointError, match=r"took 24 rows.*resume with 2 processes"):
        accumulation(tmp_path, args)


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [0, 1, 2])])
def test_a_log_keeps_what_is_not_written_again(tmp_path, step, kept):
    """A run that begins again, before its first checkpoint, also evaluates at step 0 again."""
    run = RunFolder(tmp_path)
    kinds = [("eval", 0), ("train", 1), ("train", 2), ("end", 2), ("train", 3)]
    rows = [{"kind": kind, "step": step} for kind, step in kinds]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunLog(tmp_path).on_train_begin(None, TrainerState(global_step=step, max_steps=5), None)
    assert [row["step"] for row in read_log(run.metrics)] == kept
    assert run.read_summary()["max_steps"] == 5
