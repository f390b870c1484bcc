"""What a run merges is read by transformers 4.57, which is in an environment of its own.

``make test-lowest`` installs it over this environment's packages and runs this.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.run import run_recipe
from tests.conftest import READER
from tests.older.read import read
from tests.support import tiny
from tests.support.recipes import recipe_of

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(7)
]


def as_published(file: Path) -> None:
    """Keys of the makers' own files, which both versions read, where version 5 writes others."""
    config = json.loads(file.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    file.write_text(json.dumps(config))


CASES = [
    ("qwen3_moe", None), ("qwen3_moe", {}), ("deepseek_v3", {}), ("olmoe", {}), ("mixtral", None),
]  # fmt: skip


def merged(family, lora, folder: Path) -> Path:
    """The merged checkpoint of a run on a base as its makers publish it."""
    base = tiny.save(family, folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    assert isinstance(settings["extra_special_tokens"], list)  # 4.57 reads no list there
    as_published(base / "config.json")
    write_jsonl(folder / "chat.jsonl", ROWS)
    recipe = recipe_of(
        base,
        folder / "chat.jsonl",
        router={"train": "full"},
        lora=lora,
        data={"chat_template": "chatml", "max_length": 64},
        trainer={"learning_rate": 1e-2},
    )
    return RunFolder(run_recipe(recipe, folder / "run")).merged


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The merged checkpoints, each with the older version's answer next to it."""
    made = [merged(*case, tmp_path_factory.mktemp(case[0])) for case in CASES]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("read.py")), *map(str, made)],
        env={**os.environ, "PYTHONPATH": str(READER)},
        capture_output=True,
        text=True,
        cwd=made[0].parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return made


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_a_merged_run(folders, number):
    folder = folders[number]
    logits, ours = read(str(folder))
    with safe_open(f"{folder}.answer", "pt") as file:
        theirs = json.loads(file.metadata()["said"])
        difference = (file.get_tensor("logits") - logits).abs().max().item()
    assert theirs.pop("version").startswith("4.57") and ours.pop("version").startswith("5.")
    assert difference < 1e-5 * logits.abs().max().item()
    assert theirs == ours and ours["not loaded"] == []
    assert "<extra>" in ours["special"] and "<|im_end|>\n" in ours["chat"]
    assert 2 in ours["ends"]  # <|im_end|>, the end of chatml's answers
