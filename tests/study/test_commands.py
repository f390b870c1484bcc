"""The verb: its plan, and one message with exit code 2 for every wrong input."""

import pytest

from moe_finetune.cli import main
from moe_finetune.errors import OutputExistsError
from moe_finetune.study import expand, load_study
from moe_finetune.study.folder import prepare

BASE = {"model": {"path": "some/model"}, "data": {"train": "a.jsonl"}}
STUDY = {"base": BASE, "axes": {"method": ["none", "erc"]}, "seeds": [1], "baseline": "none"}


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"baseline": "nome"}, [], "baseline: no axis has a value 'nome'; did you mean 'none'?"),
        ({"seeds": []}, [], "seeds: "),
        ({}, ["trainer.max_stps=3"], "trainer.max_stps: unknown key"),
        ({}, ["launch.kind=accelerate"], "launch.config: is missing"),
        ({}, ["--shard", "3/2"], "shard 3/2: expected i/n"),
        ({}, ["--shard", "half"], "--shard half: expected I/N"),
    ],
)
def test_wrong_input_is_one_message_and_starts_nothing(
    changes, arguments, message, write_study, tmp_path, capsys
):
    file = write_study({**STUDY, **changes})
    output = tmp_path / "out"
    assert main(["study", str(file), *arguments, "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and said.count("error: ") == 1
    assert not (output / "runs").exists()


def test_missing_file_or_output(write_study, capsys):
    assert main(["study", "gone.yaml", "--output", "x"]) == 2
    assert "there is no recipe file gone.yaml" in capsys.readouterr().err
    assert main(["study", str(write_study(STUDY))]) == 2
    assert "--output: give the folder of the study" in capsys.readouterr().err


def test_another_study_does_not_take_the_folder(write_study, tmp_path):
    """Shards go into a folder that others have made: only of the same study."""
    file, output = write_study(STUDY), tmp_path / "out"
    study = load_study(file)
    prepare(study, expand(study), output, resume=False)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    other = load_study(file, ["trainer.max_steps=77"])
    with pytest.raises(OutputExistsError, match="contains another study"):
        prepare(other, expand(other), output, resume=True)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    fewer = load_study(file, ["only.method=[none]"])
    prepare(fewer, expand(fewer), output, resume=True)


@pytest.mark.parametrize("override", ["launch.kind=slurm", "launch.hours=3", "plan.devices=8"])
def test_unknown_keys_of_a_study_are_named(write_study, capsys, override):
    assert main(["study", str(write_study(STUDY)), override, "--plan"]) == 2
    said = capsys.readouterr().err
    key = override.partition("=")[0].replace("plan.devices", "plan")
    assert f"{key}: " in said and ("unknown key" in said or "must be" in said)


def test_plan_starts_nothing(write_study, tmp_path, capsys):
    options = ["--output", str(tmp_path / "out")]
    assert main(["study", str(write_study(STUDY)), *options, "--plan"]) == 0
    said = capsys.readouterr().out
    assert "study: 2 runs" in said and "\nnone " in said and "\nerc " in said
    assert "router.train differs between arms (frozen in none; full in erc)" in said
    assert not (tmp_path / "out").exists()
