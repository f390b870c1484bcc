"""What four FSDP2 ranks wrote in shards goes on with four, two and one."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from moe_finetune.errors import CheckpointError
from moe_finetune.training.save_and_resume.sharded_state import FOLDER, stored
from moe_finetune.training.save_and_resume.training_state import verify_checkpoint
from tests.support.ranks import run_ranks
from tests.training.ranks.resume_worker import HALF, KILLED, METHODS, WORLDS

pytestmark = pytest.mark.slow
LIMIT = 1e-5


@pytest.fixture(scope="module")
def runs(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    run_ranks("tests.training.ranks.resume_worker", WORLDS[0], folder)
    return folder


def logged(run):
    timed = ("runtime", "per_second")
    rows = json.loads((run / "log.json").read_text())
    return [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in rows]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", METHODS)
def test_a_run_goes_on_with_another_number_of_ranks(runs, case, world):
    straight, resumed = runs / f"{case}-straight", runs / f"{case}-{world}"
    wanted, got = (load_file(run / "weights.safetensors") for run in (straight, resumed))
    assert wanted.keys() == got.keys() and len(wanted) > 20
    apart = {name: float((wanted[name] - got[name]).abs().max()) for name in wanted}
    assert max(apart.values()) <= (0.0 if world == WORLDS[0] else LIMIT), max(apart.items())
    rows, logs = logged(straight), logged(resumed)
    assert [row["step"] for row in logs] == [2, 3, 4, 5]  # also at each save
    for row, log in zip(rows, logs, strict=True):
        assert row.keys() == log.keys()
        for name, value in row.items():
            assert log[name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), (name, row["step"])


@pytest.mark.parametrize("case", METHODS)
def test_ranks_write_their_own_part(runs, case):
    folder = runs / f"{case}-straight" / f"checkpoint-{HALF}"
    files = sorted(file.name[:11] for file in (folder / FOLDER).iterdir())
    assert files == [f"shard-0000{n}" for n in (1, 2, 3, 4)]
    held = {name.partition("/")[0] for name in stored(folder)}
    assert held == ({"optimizer", "weights"} if case == "whole" else {"optimizer"})
    assert (folder / "adapter_model.safetensors").is_file() == (case != "whole")
    assert not [
        file for file in folder.rglob("*") if file.suffix not in (".safetensors", ".json", "")
    ]


def test_a_missing_or_damaged_shard_is_seen(runs, tmp_path):
    folder = tmp_path / f"checkpoint-{HALF}"
    shutil.copytree(runs / "whole-straight" / folder.name, folder)
    shard = sorted((folder / FOLDER).iterdir())[1]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{shard.name}: is damaged"):
        verify_checkpoint(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: is missing"):
        verify_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"parts of .* are missing"):
        stored(folder)


PLACES = (r"checkpoint-\d/shards/", r"checkpoint-\d/trainer/rank", r"checkpoint-\d/manifest.json$")
"""Where a rank dies: at its own shard, and on rank 0 later in the save."""


def test_a_rank_that_dies_while_it_saves_leaves_the_run_as_it_would_be(warm, tmp_path):
    worker = "tests.training.ranks.resume_worker"
    run_ranks(worker, 2, tmp_path, "straight", "")
    for place in PLACES:  # one run meets what each kill leaves
        with pytest.raises(AssertionError):
            run_ranks(worker, 2, tmp_path, "run", place)
    run_ranks(worker, 2, tmp_path, "run", "")
    for case in KILLED:
        wanted, got = (
            (tmp_path / f"{case}-{name}" / "weights.safetensors").read_bytes()
            for name in ("straight", "run")
        )
        assert wanted == got, case
