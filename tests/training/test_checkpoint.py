"""The checkpoint folder: appears whole, says when it is damaged, and is never the last to go."""

import errno
import json

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune.errors import CheckpointError, DiskSpaceError
from moe_finetune.io import write_small
from moe_finetune.training.checkpoint import (
    MANIFEST,
    checkpoints,
    newest_checkpoint,
    rotate,
    verify_checkpoint,
    write_checkpoint,
)
from moe_finetune.training.rank_state import pack_rank, rank_file, written_by

PARTS = [
    lambda folder: write_small(folder, "one.bin", b"first" * 11),
    lambda folder: write_small(folder, "two.json", b'{"second": 2}'),
]


def made(root, step):
    write_checkpoint(root / f"checkpoint-{step}", PARTS)
    return root / f"checkpoint-{step}"


def test_what_is_written_verifies(tmp_path):
    folder = made(tmp_path, 3)
    verify_checkpoint(folder)
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "one.bin", "two.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_files_of_safetensors_can_be_read_by_others(tmp_path):
    target = tmp_path / "checkpoint-3"
    write_checkpoint(
        target, [lambda folder: save_file({"w": torch.ones(3)}, folder / "w.safetensors")]
    )
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
    made(tmp_path, 200)
    assert not list(tmp_path.glob(".checkpoint-200.partial-*"))


def test_a_full_disk_leaves_what_was_there(tmp_path):
    good = made(tmp_path, 1)

    def full(folder):
        (folder / "half").write_bytes(b"...")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskSpaceError, match="no space left"):
        write_checkpoint(tmp_path / "checkpoint-2", [*PARTS, full])
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    verify_checkpoint(good)


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


def test_ranks_of_another_version_are_refused(tmp_path):
    file = tmp_path / rank_file(0)
    file.write_bytes(pack_rank({"world_size": 2, "rows": 24}))
    assert written_by(tmp_path) == (2, 24)
    file.write_bytes(pack_rank({"world_size": 2}))
    with pytest.raises(CheckpointError, match=rf"{file.name}: has no rows; another version"):
        written_by(tmp_path)
    save_file({"a": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=rf"{file.name}: has no rows and no world_size"):
        written_by(tmp_path)
