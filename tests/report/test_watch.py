"""A run as it is watched: curves, load, and what is still being written."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from moe_finetune import cli
from moe_finetune.errors import DataError
from moe_finetune.report.watch import SHADES, draw, find_run, heat_map, look


def snapshot(run, name, load, **more):
    """Write the load of two layers and six experts as a measurement of the run."""
    content = {"layers": [0, 1], "num_experts": 6, "load": load, **more}
    (run / "routing" / name).write_text(json.dumps(content) + "\n")


@pytest.fixture
def run(tmp_path):
    """A run of 8 steps of which 5 are logged, the last line half."""
    folder = tmp_path / "runs" / "one"
    (folder / "routing").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("trainer: {num_train_epochs: 2}\n")
    rows = [
        {"kind": "train", "step": step, "epoch": step / 4, "loss": 3 - step / 8,
         "losses/variance": -0.25 * step, "routing/max_violation": 0.5, "tokens_per_second": 1234.5}
        for step in range(1, 6)
    ]  # fmt: skip
    rows.insert(2, {"kind": "eval", "step": 2, "eval_loss": 2.5})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "train", "step": 6, "lo')
    snapshot(folder, "before.json", [[0, 10, 20, 10, 10, 10], [30, 6, 6, 6, 6, 6]])
    return folder


def shown(picture, width=72) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(picture, width))
    return console.file.getvalue()


def test_what_is_logged_so_far(run):
    picture = look(run)
    assert (picture.step, picture.steps, picture.finished) == (5, 8, False)
    assert picture.values["loss"] == [2.875, 2.75, 2.625, 2.5, 2.375]
    np.testing.assert_allclose(picture.load_LE[1], [3, 0.6, 0.6, 0.6, 0.6, 0.6])
    lines = [line.split() for line in shown(picture).splitlines()]
    assert ["step", "5/8", "1,234", "tokens/s", "last", "log"] in [line[:6] for line in lines]
    loss = next(line for line in lines if line[:1] == ["loss"])
    assert loss[1:3] == ["2.875", "2.375"] and loss[3] == "█▆▅▃▁"
    assert ["validation", "loss", "2.5", "2.5"] in lines
    assert next(line for line in lines if line[:1] == ["variance"])[1:3] == ["-0.25", "-1.25"]


def test_a_stage_shows_its_objective_first(run):
    row = {"kind": "train", "step": 6, "loss": 0.0, "reward": 0.25, "rewards/margins": -0.5}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    names = [line.split()[:2] for line in shown(look(run)).splitlines()]
    header = names.index(["first", "last"])  # below the run's path, of one line or more
    assert names[header + 1 : header + 4] == [
        ["reward", "0.25"],
        ["reward", "margin"],
        ["loss", "0"],
    ]


def test_the_newest_measurement_is_drawn(run):
    snapshot(run, "steps.jsonl", [[1, 1, 1, 1, 1, 7], [1, 1, 1, 1, 1, 1]], step=4)
    text = shown(look(run))
    assert "load at step 4: 2 layers down, 6 experts across" in text
    assert f"     0  {SHADES[1] * 5}{SHADES[4]}" in text and f"     1  {SHADES[2] * 6}" in text
    snapshot(run, "after.json", [[2, 2, 2, 2, 2, 2]] * 2)
    assert "load after: 2 layers" in shown(look(run))


def test_what_does_not_fit_is_averaged():
    load_LE = np.ones((3, 40))
    load_LE[2, :2] = (4, 0)
    lines = [line.plain for line in heat_map(load_LE, "after", 30)]
    assert lines[0].endswith("neighbors averaged")
    assert lines[3] == "     2  " + SHADES[4] + SHADES[2] * 19, "4 and 0 are 2 on average"


def test_a_folder_of_runs_is_the_run_that_wrote_last(run):
    other = run.parent / "other"
    other.mkdir()
    (other / "recipe.yaml").write_text("{}")
    assert find_run(run.parent) == other
    (run / "metrics.jsonl").touch()
    assert find_run(run.parent) == run
    with pytest.raises(DataError, match="contains no run"):
        find_run(run.parent.parent)


def test_the_verb_shows_it_once_without_a_terminal(run, capsys):
    assert cli.main(["watch", str(run)]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert cli.main(["watch", str(run / "routing")]) == 2
    assert "contains no run; give the --output" in capsys.readouterr().err
