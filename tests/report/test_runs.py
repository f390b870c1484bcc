"""Reading a run's folder: what is there, what is damaged, what is missing."""

import json
import math
from pathlib import Path

import pytest

from moe_finetune.errors import DataError, TraceError
from moe_finetune.report.read_runs import find_runs, read_run, read_runs
from tests.report.folders import write_run


def _metrics(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_curves_are_sorted_and_a_step_logged_again_replaces_the_first(tmp_path: Path):
    rows = [(10, 3.0), (20, 2.0), (30, 9.0), (30, 1.0), (5, 4.0)]
    lines = [json.dumps({"kind": "train", "step": s, "loss": v}) for s, v in rows]
    run = read_run(_metrics(tmp_path / "run", *lines), "run")
    assert run.curves["loss"].steps == [5, 10, 20, 30]
    assert run.curves["loss"].values == [4.0, 3.0, 2.0, 1.0]
    assert run.last_step == 30


def test_unknown_keys_and_kinds_are_kept(tmp_path: Path):
    run = read_run(
        _metrics(
            tmp_path / "run",
            '{"kind": "train", "step": 1, "mine/new": 1.5, "note": "hello", "none": null}',
            '{"kind": "train", "step": 2, "mine/new": NaN, "note": [1, 2]}',
            '{"kind": "end", "step": 2, "train_runtime": 8.5}',
        ),
        "run",
    )
    assert run.curves["mine/new"].values[0] == 1.5
    assert math.isnan(run.curves["mine/new"].values[1])
    assert math.isnan(run.curves["none"].values[0])
    assert run.curves["end/train_runtime"].values == [8.5]
    assert run.last_values == {"note": [1, 2]}


def test_missing_files_leave_fields_empty(tmp_path: Path):
    run = read_run(_metrics(tmp_path / "run", '{"step": 1, "loss": 2.0}'), "run")
    assert (run.recipe, run.environment, run.scores, run.routing_before, run.routing_after) == (
        {},
        {},
        {},
        None,
        None,
    )
    assert run.model is None
    assert run.method is None


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("recipe.yaml", "a: 1\nb: [1\nc: 2\n", ":3: not YAML"),
        ("recipe.yaml", "- 1\n", "expected a mapping, found list"),
        ("eval/results.json", '{"tasks": {\n"x": }}', ":2: not JSON"),
        ("eval/results.json", '{"tasks": {"x": {"stderr": 0.1}}}', "task 'x' has no 'value'"),
        ("eval/results.json", '{"tasks": []}', None),
        ("eval/results.json", '{"tasks": [1]}', "'tasks' must map"),
        ("environment.json", '"text"', "contains str instead of an object"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, name: str, text: str, place: str | None):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(text)
    if place is None:
        assert read_run(folder, "run").scores == {}
        return
    with pytest.raises(DataError) as caught:
        read_run(folder, "run")
    assert str(folder / name) in str(caught.value)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": [[1, 2, 3]]}, r"'load' has shape \(1, 3\), expected \(2, 5\)"),
        ({"load": None}, r"'load' has shape \(\), expected \(2, 5\)"),
        ({"load": [[1, 2], [3]]}, "'load' is missing or malformed"),
        ({"domains": {"code": [[1] * 5]}}, r"'domains\.code' has shape \(1, 5\)"),
        (
            {"conditional_activation": {"layers": [0, 1], "matrix": [[1]]}},
            r"'conditional_activation\.matrix' has shape \(1, 1\), expected \(5, 5\)",
        ),
        ({"coherence": {"per_layer": [0.1, 0.2]}}, "'coherence' is missing or malformed"),
        ({"colored_text": [{"tokens": ["a"]}]}, "'colored_text' is missing or malformed"),
    ],
)
def test_wrong_shapes_in_a_snapshot_are_named(tmp_path: Path, change: dict, message: str):
    from moe_finetune.report import write_report

    folder = tmp_path / "run"
    (folder / "routing").mkdir(parents=True)
    snapshot = {"layers": [0, 1], "num_experts": 5, "load": [[1, 2, 3, 4, 5]] * 2} | change
    (folder / "routing" / "after.json").write_text(json.dumps(snapshot))
    with pytest.raises(TraceError, match=message) as caught:
        write_report([folder], tmp_path / "page.html")
    assert "after.json" in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_folder_of_runs_is_opened_by_name(tmp_path: Path):
    b, a = _metrics(tmp_path / "all" / "b", "{}"), _metrics(tmp_path / "all" / "a", "{}")
    (tmp_path / "all" / "other").mkdir()
    assert find_runs([tmp_path / "all"]) == [a, b]
    assert find_runs([b, a]) == [b, a]


def test_folder_without_runs(tmp_path: Path):
    with pytest.raises(DataError, match="no results of a run; a run's folder contains some"):
        find_runs([tmp_path])
    with pytest.raises(DataError, match="no such folder"):
        find_runs([tmp_path / "absent"])
    with pytest.raises(DataError, match="no run given; give the --output folder of at"):
        find_runs([])


def test_labels(tmp_path: Path):
    line = '{"step": 1, "loss": 1}'
    x, y = _metrics(tmp_path / "x" / "run", line), _metrics(tmp_path / "y" / "run", line)
    z = _metrics(tmp_path / "z", line)
    assert [r.label for r in read_runs([x, z])] == ["run", "z"]
    assert [r.label for r in read_runs([x, y])] == ["x/run", "y/run"]
    assert [r.label for r in read_runs([x, x])] == ["1: x/run", "2: x/run"]
    assert [r.label for r in read_runs([x, y], ["aux", "ours"])] == ["aux", "ours"]
    with pytest.raises(DataError, match="1 label for 2 runs"):
        read_runs([x, y], ["aux"])
