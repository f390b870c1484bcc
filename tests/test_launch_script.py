"""The one-file script with inline metadata: a real training of a tiny checkpoint, then a merge."""

import json
import re
import runpy
import sys
import tomllib

import pytest

from moe_finetune import cli
from tests.conftest import ROOT

SCRIPT = ROOT / "recipes" / "launch" / "callback_30b.py"
METADATA = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""The expression of the specification of inline script metadata."""


def test_what_uv_would_install():
    """The checkout takes the place of the git address, which names a commit of it."""
    (block,) = METADATA.finditer(SCRIPT.read_text(encoding="utf-8"))
    lines = block["content"].splitlines()
    metadata = tomllib.loads("\n".join(line[2:] for line in lines))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["requires-python"] == project["requires-python"]
    (dependency,) = metadata["dependencies"]
    name, address = dependency.split(" @ ")
    assert (
        name == "moe-finetune[quantization]" and "quantization" in project["optional-dependencies"]
    )
    source = re.escape(f"git+{project['urls']['Source']}@")
    assert re.fullmatch(source + "[0-9a-f]{40}", address)


@pytest.mark.slow
def test_it_trains_and_ends_with_the_steps_table(checkpoint, tmp_path, monkeypatch, capsys):
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."}]
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(24)))
    options = ["--model", str(checkpoint), "--data", str(data), "--output", str(run), "--full"]
    options += ["--steps", "3", "--length", "64", "--dtype", "float32", "--method", "aux_loss"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    table, command = capsys.readouterr().out.strip().splitlines()[-2:]
    row = json.loads(table)["rows"]["callback"]
    assert row["median_s"] > 0 and row["tokens_per_s"] > 0
    # The command that it prints, run as it stands.
    words = command.removeprefix("next: ").split()
    assert cli.main(words[1:]) == 0 and "verified: " in capsys.readouterr().out
    assert (run / "merged" / "config.json").is_file()
