"""The files of a run by name, its log while it is written, and the note that something is done."""

import json
import math

import pytest

from moe_finetune.errors import DataError
from moe_finetune.io.run_folder import RunFolder, read_log


def test_states_of_training_are_in_the_order_of_their_steps(tmp_path):
    for name in ("100", "9", "20", "x", "3.tmp"):
        (tmp_path / "steps" / name).mkdir(parents=True)
    assert list(RunFolder(tmp_path).kept_steps()) == [9, 20, 100]


def test_a_stage_is_done_when_its_product_and_its_note_are_there(tmp_path):
    run = RunFolder(tmp_path)
    assert not run.trained and not run.merge_done
    run.adapter.mkdir()
    assert run.trained and not run.merge_done
    run.merged.mkdir()
    assert not run.merge_done, "killed before its note"
    run.note(merge={"seconds": 2.5})
    run.note(seconds=3.5)
    assert run.merge_done and run.read_summary() == {"merge": {"seconds": 2.5}, "seconds": 3.5}
    run.adapter.rmdir()
    run.summary.unlink()
    assert run.trained and run.merge_done, "the whole model was trained"


def test_a_log_is_read_while_it_is_written(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert read_log(log) == []
    whole = '{"step": 1, "loss": 2.5}\n\n{"step": 2, "loss": NaN}\n'
    for end, steps in (
        ("", [1, 2]),
        ('{"step": 3, "lo', [1, 2]),
        ('{"step": 3, "load": {"a": 1}', [1, 2]),
        ('{"step": 3}', [1, 2, 3]),
    ):
        log.write_text(whole + end)
        rows = read_log(log)
        assert [row["step"] for row in rows] == steps
        assert rows[0]["loss"] == 2.5 and math.isnan(rows[1]["loss"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"step": 3, "loss"', "not JSON"),
        ("[1, 2]", "must be an object, not list"),
        ('{"loss": 1.0}', "'step' is None, not a number"),
        ('{"step": true}', "'step' is True"),
        ('{"step": NaN}', "'step' is nan"),
    ],
)
def test_a_damaged_row_is_named(tmp_path, line, problem):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(DataError) as refused:
        read_log(log)
    assert f"{log}:2: {problem}" in str(refused.value)


def test_a_finished_run_names_its_evidence(tmp_path):
    run = RunFolder(tmp_path)
    assert not run.finished and run.evidence() == {}
    for file in (run.metrics, run.results, run.evaluation / "tasks" / "sums" / "samples.jsonl"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    run.note(seconds=1.5)
    run.finish()
    summary = json.loads(run.summary.read_text())
    assert run.finished and summary["seconds"] == 1.5 and summary["evidence"] == run.evidence()
    names = ["metrics.jsonl", "eval/results.json", "eval/tasks/sums/samples.jsonl"]
    assert list(summary["evidence"]) == names
    run.metrics.write_text("other")
    assert run.evidence() != summary["evidence"]
    run.note(finished=False)
    assert not run.finished
