"""Wrong keys are known before torch and TRL are imported."""

import json
import subprocess
import sys
from typing import Any

import pytest

from moe_finetune.recipe.stages import STAGES, trainer_section
from moe_finetune.recipe.trainer_source import section_in_source

PROGRAM = """
import contextlib, io, json, sys
from moe_finetune import cli
answers = []
for command in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(command)
    assert not {"torch", "transformers", "trl"} & sys.modules.keys(), command
    answers.append([code, said.getvalue()])
json.dump(answers, sys.stdout)
"""


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_the_source_shows_the_fields_of_the_class(stage):
    """Names, choices and limits; a type is the class's or left to the import."""
    source, real = section_in_source(stage).model_fields, trainer_section(stage).model_fields
    assert source.keys() == real.keys() and len(source) > 90
    for name, field in source.items():
        if field.annotation is not Any:
            assert field.annotation == real[name].annotation, name
            assert str(field.metadata) == str(real[name].metadata), name
    assert sum(field.annotation is Any for field in source.values()) < 12


CASES = [
    (["--help"], None),
    (["--outptu", "x"], "No such option: --outptu"),
    (["learning_rte=3", "lora.r=2"], "learning_rte: unknown key\nlora.rank"),
    (["trainer.learning_rte=3"], "did you mean 'learning_rate'"),
    (["trainer.learning_rate=fast"], "trainer.learning_rate: must be a valid number"),
    (["trainer.beta=0.1"], "it belongs to stage dpo or grpo"),
    (["trainer.load_in_4bit=true"], "did you mean 'model.quantization: nf4'?"),
    (["trainer.max_seq_length=99"], "did you mean 'data.max_length'?"),
    (["model.path=3"], "model.path: must be a valid string, not 3"),
    (["stage=sftt"], "stage: must be 'sft', 'pretrain', 'dpo' or 'grpo', not 'sftt'"),
]


def test_a_wrong_key_ends_without_the_heavy_imports(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\nmethod: erc\ndata: {train: t.jsonl}\n")
    output = ["--output", str(tmp_path / "run")]
    commands = [["train", str(recipe), *arguments, *output] for arguments, _ in CASES]
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert child.returncode == 0, child.stderr
    for (arguments, said), (code, shown) in zip(CASES, json.loads(child.stdout), strict=True):
        assert code == (0 if said is None else 2), (arguments, shown)
        assert all(part in shown for part in (said or "").split("\n")), (arguments, shown)
