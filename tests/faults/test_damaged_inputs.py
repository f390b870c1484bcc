"""Damaged inputs: each ends with exit code 2, one message with the place, nothing changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.cli import main
from moe_finetune.placement.plan import PlacementPlan
from moe_finetune.routing.trace import TraceWriter
from tests.checkpoint import helpers
from tests.faults.harness import write_inputs
from tests.placement.traces import topical

pytestmark = pytest.mark.faults

SHARD = "model.safetensors"
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Inputs in good order, which every case copies and then damages."""
    folder = tmp_path_factory.mktemp("good")
    write_inputs("qwen3_moe", folder)
    helpers.adapter(folder_named(folder), folder / "adapter")
    index_TLK, seq_T = topical(layers=3, tokens=300)
    with TraceWriter(
        folder / "trace",
        model_type="qwen3_moe",
        checkpoint="base",
        layers=(0, 1, 2),
        num_experts=12,
        top_k=3,
        hidden_size=192,
    ) as writer:
        weights_TLK = np.full(index_TLK.shape, 1 / 3)
        writer.append(index_TLK=index_TLK, weights_TLK=weights_TLK, seq_T=seq_T)
    ranks_LE = np.tile(np.repeat(np.arange(4), 3), (3, 1))
    PlacementPlan.of("qwen3_moe", [0, 1, 2], 4, ranks_LE).write(folder / "plan.json")
    return folder


def folder_named(folder: Path) -> Path:
    """The base under its family's name, which the helper reads off the path."""
    link = folder / "qwen3_moe"
    link.symlink_to(folder / "base")
    return link


# -- ways to damage ---------------------------------------------------------------------------


def cut(name, share=0.5):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def gone(name):
    return lambda folder: (folder / name).unlink()


def flip(name, place):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 0xFF
        (folder / name).write_bytes(content)

    return damage


def keys(name, **changes):
    """Change top-level keys of a JSON file; None removes one."""

    def damage(folder):
        held = json.loads((folder / name).read_text())
        for key, value in changes.items():
            held.pop(key, None)
            if value is not None:
                held[key] = value
        (folder / name).write_text(json.dumps(held))

    return damage


def row(content):
    """A good row before and after the one that is damaged."""
    line = '{"prompt": "p", "completion": "c"}\n'
    return text("train.jsonl", line + content + "\n" + line)


TRAIN = ["train", "recipe.yaml", "--output", "out"]
RESUME = [*TRAIN, "--resume"]
MERGE = ["merge", "adapter", "--base", "base", "--output", "out"]
INSPECT = ["inspect", "base"]
PLACE = ["place", "trace", "--ranks", "4", "--output", "out"]
SELECT = ["select", "trace", "--output", "out"]
PERMUTE = ["permute", "base", "-p", "plan.json", "--output", "out"]
NOTHING = lambda folder: None  # noqa: E731

CASES = [
    # recipes
    ("recipe cut", cut("recipe.yaml"), TRAIN, "recipe.yaml"),
    ("recipe binary", text("recipe.yaml", "\0\1\2"), TRAIN, "recipe.yaml"),
    ("recipe a folder", NOTHING, ["train", "base", "--output", "out"], "base"),
    ("recipe unknown key", keys("recipe.yaml", modle={}), TRAIN, "did you mean 'model'"),
    ("recipe output not empty", NOTHING, ["train", "recipe.yaml", "--output", "base"], "base"),
    ("resume of nothing", NOTHING, RESUME, "--resume"),
    # datasets
    ("data missing", gone("train.jsonl"), TRAIN, "train.jsonl"),
    ("data empty", text("train.jsonl", ""), TRAIN, "train.jsonl"),
    ("data a broken line", row('{"prompt": "p", "compl'), TRAIN, "train.jsonl"),
    ("data no completion", row('{"prompt": "p"}'), TRAIN, "train.jsonl"),
    ("data wrong type", row('{"prompt": "p", "completion": 3}'), TRAIN, "train.jsonl"),
    ("data null", row('{"prompt": null, "completion": "c"}'), TRAIN, "train.jsonl"),
    ("data binary", text("train.jsonl", "\0\1"), TRAIN, "train.jsonl"),
    ("data wrong column", NOTHING, [*TRAIN, "data.columns={prompt: question}"], "question"),
    # checkpoints
    ("checkpoint missing", lambda f: shutil.rmtree(f / "base"), INSPECT, "base"),
    ("checkpoint no config", gone("base/config.json"), INSPECT, "config.json"),
    ("checkpoint config cut", cut("base/config.json"), INSPECT, "config.json"),
    ("checkpoint unknown type", keys("base/config.json", model_type="lama"), INSPECT, "lama"),
    ("checkpoint no type", keys("base/config.json", model_type=None), INSPECT, "model_type"),
    ("checkpoint fewer experts", keys("base/config.json", num_local_experts=8), TRAIN, "experts"),
    ("checkpoint another size", keys("base/config.json", hidden_size=96), TRAIN, "hidden_size"),
    ("checkpoint no shard", gone(f"base/{SHARD}"), MERGE, "base"),
    ("checkpoint shard cut", cut(f"base/{SHARD}"), MERGE, SHARD),
    ("checkpoint header broken", flip(f"base/{SHARD}", 9), MERGE, SHARD),
    ("checkpoint header length", flip(f"base/{SHARD}", 6), MERGE, SHARD),
    ("checkpoint shard empty", text(f"base/{SHARD}", ""), MERGE, SHARD),
    ("tokenizer missing", gone("base/tokenizer.json"), TRAIN, "tokenizer"),
    ("tokenizer cut", cut("base/tokenizer.json"), TRAIN, "tokenizer"),
    # adapters
    ("adapter missing", lambda f: shutil.rmtree(f / "adapter"), MERGE, "adapter"),
    ("adapter no config", gone("adapter/adapter_config.json"), MERGE, "adapter_config.json"),
    ("adapter config cut", cut("adapter/adapter_config.json"), MERGE, "adapter_config.json"),
    ("adapter no weights", gone(f"adapter/{ADAPTER}"), MERGE, "adapter"),
    ("adapter weights cut", cut(f"adapter/{ADAPTER}"), MERGE, ADAPTER),
    ("adapter header broken", flip(f"adapter/{ADAPTER}", 9), MERGE, ADAPTER),
    ("adapter another method", keys("adapter/adapter_config.json", peft_type="IA3"), MERGE, "IA3"),
    ("adapter another rank", keys("adapter/adapter_config.json", r=5), MERGE, "rank"),
    # traces
    ("trace missing", lambda f: shutil.rmtree(f / "trace"), PLACE, "trace"),
    ("trace no manifest", gone("trace/trace.json"), PLACE, "trace"),
    ("trace manifest cut", cut("trace/trace.json"), SELECT, "trace.json"),
    ("trace chunk cut", lambda f: cut(chunk(f))(f), PLACE, "trace"),
    ("trace chunk missing", lambda f: gone(chunk(f))(f), SELECT, "trace"),
    ("trace ranks do not divide", NOTHING, [*PLACE[:3], "5", *PLACE[4:]], "5"),
    # plans
    ("plan missing", gone("plan.json"), PERMUTE, "plan.json"),
    ("plan cut", cut("plan.json"), PERMUTE, "plan.json"),
    ("plan another model", keys("plan.json", model_type="olmoe"), PERMUTE, "plan"),
    ("plan an expert twice", lambda f: twice(f), PERMUTE, "layer 1"),
]


def chunk(folder: Path) -> str:
    """The first file of a trace beside its manifest."""
    files = [p for p in sorted((folder / "trace").rglob("*")) if p.is_file()]
    return str(next(p for p in files if p.suffix != ".json").relative_to(folder))


def twice(folder: Path) -> None:
    (folder / "plan.json").write_text(json.dumps({"1": [0, 0, *range(2, 12)]}))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize(("name", "damage", "argv", "place"), CASES, ids=[c[0] for c in CASES])
def test_damaged(good, tmp_path, monkeypatch, capsys, name, damage, argv, place):
    for path in good.iterdir():
        if path.is_symlink():
            continue
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, tmp_path / path.name)
    recipe = json.loads((tmp_path / "recipe.yaml").read_text())
    recipe["model"]["path"] = "base"
    recipe["data"]["train"] = "train.jsonl"
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    damage(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    code = main(argv)
    _, said = capsys.readouterr()
    assert code == 2, said
    assert "Traceback" not in said
    message = said[said.rindex("error: ") :] if "error: " in said else said
    assert place in message, message
    assert contents(tmp_path) == before


def test_the_inputs_are_good_before_they_are_damaged(good, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(good)
    for argv in (MERGE, PLACE, SELECT, PERMUTE):
        assert main([*argv[:-1], str(tmp_path / argv[0])]) == 0, capsys.readouterr()[1]
    assert main(INSPECT) == 0


@pytest.mark.parametrize("verb", ["train", "analyze"])
def test_a_weight_that_overflows_names_the_layer_and_no_rows(verb, good, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    shutil.copytree(good / "base", tmp_path / "base")
    file = tmp_path / "base" / SHARD
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"].fill_(3e38)
    save_file(tensors, file, {"format": "pt"})
    recipe = json.loads((good / "recipe.yaml").read_text())
    recipe["model"]["path"] = str(tmp_path / "base")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    argv = {
        "train": ["train", str(tmp_path / "recipe.yaml")],
        "analyze": ["analyze", str(tmp_path / "base"), "-d", str(good / "train.jsonl")],
    }[verb]
    assert main([*argv, "-o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "layer 1: the model computes NaN or infinity there" in message
    assert "restore the checkpoint" in message and "rows out" not in message
