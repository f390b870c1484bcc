"""Every verb takes what the verb before it leaves, and none overwrites what it finds."""

import json
import os
import shutil

import numpy as np
import pytest

from moe_finetune import cli
from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import CheckpointError
from moe_finetune.io import output_lock
from moe_finetune.io.run_folder import checkpoint_in, checkpoint_name, results_in
from moe_finetune.routing.trace_writer import TraceWriter
from tests.checkpoint.helpers import adapter as random_adapter


@pytest.fixture
def analysis(tmp_path):
    """A folder as ``analyze`` leaves it."""
    rng = np.random.default_rng(0)
    with TraceWriter(
        tmp_path / "analysis" / "trace",
        model_type="olmoe", checkpoint="x", layers=(0, 1), num_experts=6, top_k=2,
    ) as writer:  # fmt: skip
        ids = rng.permuted(np.tile(np.arange(6), (40, 2, 1)), axis=-1)[..., :2]
        writer.append(ids, rng.random((40, 2, 2)), np.arange(40) // 5)
    (tmp_path / "analysis" / "summary.json").write_text("{}")
    return tmp_path / "analysis"


def test_a_run_stands_for_its_checkpoint_and_its_results(tmp_path):
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"moe-finetune merge {run} "):
        checkpoint_in(run)
    (run / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="moe-finetune merge"):
        checkpoint_in(run / "adapter")
    (run / "merged").mkdir()
    (run / "merged" / "config.json").write_text("{}")
    assert checkpoint_in(run) == run / "merged" and checkpoint_in("owner/name") == "owner/name"
    assert checkpoint_in(run / "merged") == run / "merged"
    assert results_in(run) == run
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text("{}")
    assert results_in(run) == results_in(run / "eval") == run / "eval"


def test_a_checkpoint_is_named_after_its_run(tmp_path, monkeypatch):
    (tmp_path / "first" / "merged").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(tmp_path / "first")
    for source in (tmp_path / "first", tmp_path / "first" / "merged"):
        assert checkpoint_name(source) == "first"
    assert checkpoint_name(tmp_path / "latest" / "merged") == "latest"
    monkeypatch.chdir(tmp_path / "first")
    assert checkpoint_name("merged") == checkpoint_name(".") == "first"
    assert checkpoint_name("..") == tmp_path.name
    assert checkpoint_name("owner/name") == "owner/name"


def test_verbs_of_checkpoints_take_a_run(tmp_path, tiny_checkpoint, capsys):
    run = tmp_path / "run"
    shutil.copytree(tiny_checkpoint("olmoe"), run / "merged")
    assert cli.main(["inspect", str(run)]) == 0
    assert cli.main(["convert", str(run), "-o", str(tmp_path / "converted")]) == 0
    (run / "adapter").mkdir()
    shutil.rmtree(run / "merged")
    output = ["-o", str(tmp_path / "o")]
    for verb in (
        ["eval", str(run), "-s", "demo", *output],
        ["convert", str(run), *output],
        ["inspect", str(run)],
    ):
        assert cli.main(verb) == 2
        assert "moe-finetune merge" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("verb", [["select"]])
def test_select_takes_an_analysis_and_never_overwrites(analysis, tmp_path, verb, capsys):
    file = tmp_path / "out" / "file.json"
    command = [verb[0], str(analysis), *verb[1:], "--output", str(file)]
    assert cli.main(command) == 0
    written = file.read_bytes()
    assert json.loads(written)["num_experts"] == 6
    assert cli.main(command) == 2
    assert f"{file} exists; choose another --output" in capsys.readouterr().err
    assert file.read_bytes() == written and os.listdir(file.parent) == ["file.json"]
    with output_lock(tmp_path / "out" / "other.json"):
        pass
    assert os.listdir(file.parent) == ["file.json"]


def test_compare_takes_runs_and_says_what_is_missing(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name / "eval").mkdir(parents=True)
        (tmp_path / name / "eval" / "results.json").write_text("[]")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert str(tmp_path / "a" / "eval") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LICENSE", "notes.txt", "additional_chat_templates/x.jinja"])
def test_links_out_of_a_checkpoint_are_not_copied(tmp_path, tiny_checkpoint, name):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    base = tmp_path / "qwen3_moe"
    shutil.copytree(tiny_checkpoint("qwen3_moe"), base)
    adapter = random_adapter(base, tmp_path / "adapter")
    (base / name).parent.mkdir(exist_ok=True)
    (base / name).symlink_to(secret)
    output = tmp_path / "copy"
    for write in (
        lambda: merge_adapter(base, adapter, output),
        lambda: convert_checkpoint(base, output),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: is a link to {secret}, outside"):
            write()
    assert not output.exists()
    (base / name).unlink()
    (base / name).symlink_to(base / "config.json")  # inside it may link as it likes
    merge_adapter(base, adapter, output)
    assert (output / name).read_bytes() == (base / "config.json").read_bytes()


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path, tiny_checkpoint):
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    shutil.copytree(tiny_checkpoint("qwen3_moe"), blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    copy = convert_checkpoint(snapshot, tmp_path / "copy")
    assert not any(path.is_symlink() for path in copy.iterdir())
    (snapshot / "LICENSE").symlink_to("../../../elsewhere")
    (tmp_path / "elsewhere").write_text("secret")
    with pytest.raises(CheckpointError, match="LICENSE: is a link"):
        convert_checkpoint(snapshot, tmp_path / "again")


@pytest.mark.parametrize("key", ["label", "task"])
@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "..", ".hidden", "x" * 300, "a\nb"])
def test_names_of_a_suite_cannot_lead_out_of_the_output(tmp_path, key, name, capsys):
    entry = {"task": "gsm8k", "metric": "exact_match", key: name}
    (tmp_path / "suite.yaml").write_text(json.dumps({"name": "s", "tasks": [entry]}))
    command = ["eval", str(tmp_path), "-s", str(tmp_path / "suite.yaml"), "-o", str(tmp_path / "o")]
    assert cli.main([*command, "--backend", "hf"]) == 2
    assert f"{key} '" in capsys.readouterr().err and not (tmp_path / "o").exists()
