"""Damaged inputs: each ends with exit code 2, one message with the place, nothing changed."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moe_finetune.cli import main

pytestmark = pytest.mark.faults

SHARD = "model.safetensors"
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
SELECT = ["select", "trace", "--output", "out"]
NOTHING = lambda folder: None  # noqa: E731

CASES = [
    # recipes
    ("recipe cut", cut("recipe.yaml"), TRAIN, "recipe.yaml"),
    ("recipe output not empty", NOTHING, ["train", "recipe.yaml", "--output", "base"], "base"),
    ("resume of nothing", NOTHING, RESUME, "--resume"),
    # datasets
    ("data a broken line", row('{"prompt": "p", "compl'), TRAIN, "train.jsonl"),
    ("data wrong column", NOTHING, [*TRAIN, "data.columns={prompt: question}"], "question"),
    # checkpoints
    ("checkpoint fewer experts", keys("base/config.json", num_local_experts=8), TRAIN, "experts"),
    ("checkpoint shard cut", cut(f"base/{SHARD}"), MERGE, SHARD),
    ("tokenizer missing", gone("base/tokenizer.json"), TRAIN, "tokenizer"),
    # adapters
    ("adapter another method", keys("adapter/adapter_config.json", peft_type="IA3"), MERGE, "IA3"),
    # traces
    ("trace manifest cut", cut("trace/trace.json"), SELECT, "trace.json"),
    ("trace chunk cut", lambda f: cut(chunk(f))(f), SELECT, "trace"),
]


def chunk(folder: Path) -> str:
    """The first file of a trace beside its manifest."""
    files = [p for p in sorted((folder / "trace").rglob("*")) if p.is_file()]
    return str(next(p for p in files if p.suffix != ".json").relative_to(folder))


@pytest.mark.parametrize(("name", "damage", "argv", "place"), CASES, ids=[c[0] for c in CASES])
def test_damaged(here, refused, name, damage, argv, place):
    damage(here)
    refused(argv, place)


def test_the_inputs_are_good_before_they_are_damaged(here, tmp_path_factory, capsys):
    made = tmp_path_factory.mktemp("made")
    for argv in (MERGE, SELECT):
        assert main([*argv[:-1], str(made / argv[0])]) == 0, capsys.readouterr()[1]


@pytest.mark.parametrize("argv", [TRAIN, ["analyze", "base", "-d", "train.jsonl", "-o", "out"]])
def test_a_weight_that_overflows_names_the_layer_and_no_rows(argv, here, capsys):
    file = here / "base" / SHARD
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"].fill_(3e38)
    save_file(tensors, file, {"format": "pt"})
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert "layer 1: the model computes NaN or infinity" in message
    assert "restore the checkpoint" in message and "remove those rows" not in message
