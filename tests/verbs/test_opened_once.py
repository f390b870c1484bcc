"""Each verb opens a checkpoint once: its config, headers and family, whatever it does with them."""

import pytest

from moe_finetune import cli, models
from moe_finetune.checkpoint import open as opened
from moe_finetune.evaluation.backends import open_backend
from tests.checkpoint import helpers


@pytest.fixture
def openings(monkeypatch):
    """Names of the folders whose headers are read, and of the questions for a family."""
    folders, families = [], []
    read_headers, find_family = opened.read_headers, models.find_family
    monkeypatch.setattr(
        opened, "read_headers", lambda folder: folders.append(folder.name) or read_headers(folder)
    )
    monkeypatch.setattr(
        models, "find_family", lambda *names: families.append(names) or find_family(*names)
    )
    return folders, families


def test_each_verb_opens_a_checkpoint_once(tiny_checkpoint, tmp_path, openings):
    base, law = tiny_checkpoint("qwen3_moe"), tmp_path / "law.jsonl"
    adapter = helpers.adapter(base, tmp_path / "adapter")
    law.write_text('{"text": "the court finds"}\n')
    folders, families = openings

    def run(*arguments):
        folders.clear(), families.clear()
        assert cli.main([*map(str, arguments)]) == 0

    run("merge", adapter, "--base", base, "--verify", "--output", tmp_path / "merged")
    assert folders == ["qwen3_moe", "merged"] and len(families) == 2
    run("analyze", base, "--adapter", adapter, "--data", law, "--output", tmp_path / "analysis")
    assert folders == ["qwen3_moe"] and len(families) == 1
    run("inspect", base)
    assert folders == ["qwen3_moe"] and len(families) == 1
    open_backend(base, "hf", adapter=adapter, batch_size=2).close()
    assert folders == 2 * ["qwen3_moe"] and len(families) == 2
