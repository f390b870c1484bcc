"""A command looks for what is missing and does its work under one lock of its output."""

import json

import pytest
from typer.testing import CliRunner

from moe_finetune.cli import app
from moe_finetune.io import lock

COMMANDS = {
    "train": ("moe_finetune.run.run_recipe", ["train", "{recipe}"]),
    "analyze": ("moe_finetune.report.analysis.analyze", ["analyze", "{base}"]),
    "eval": ("moe_finetune.evaluation.engine.evaluate", ["eval", "{base}", "--suite", "gsm8k"]),
}


class Reached(Exception):
    """The work began."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_nobody_can_write_between_the_check_and_the_work(
    verb, tiny_checkpoint, tmp_path, monkeypatch
):
    work, command = COMMANDS[verb]
    base, output, rows = tiny_checkpoint("qwen3_moe"), tmp_path / "out", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 2 = ", "completion": "4"}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{path: {base}}}\ndata: {{train: {rows}}}\nlora: {{rank: 2}}\n")
    take, taken = lock._take, []

    def noted(target, *rest):
        taken.append(target)
        return take(target, *rest)

    def began(*_, **__):
        assert [held for held, _ in lock._held] == [output]
        raise Reached

    monkeypatch.setattr(lock, "_take", noted)
    monkeypatch.setattr(work, began)
    arguments = [part.format(base=base, recipe=recipe) for part in command]
    result = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert isinstance(result.exception, Reached), result.output
    assert taken == [output]
