"""`eval/validate.py`: a judge, blinded sheets and their agreement with the rules."""

import csv
import importlib.util
import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("validate", ROOT / "eval" / "validate.py")
validate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(validate)


def write_results(folder, answers):
    """A folder of results with one generation task; the right answer of item N is N."""
    file = folder / "tasks" / "s" / "samples.jsonl"
    file.parent.mkdir(parents=True)
    task = {"task": "t", "metric": "exact_match", "filter": "strict-match",
            "samples": "tasks/s/samples.jsonl", "value": 0.5}  # fmt: skip
    (folder / "results.json").write_text(json.dumps({"schema": 1, "tasks": {"sums": task}}))
    rows = [
        {
            "task": "t", "doc_id": i, "item": f"i{i}", "filter": f, "target": str(i),
            "doc": {"question": f"What is {i}?"}, "replies": [[answer]],
            "metrics": {"exact_match": float(answer == str(i))},
        }
        for i, answer in enumerate(answers)
        for f in ("flexible-extract", "strict-match")
    ]  # fmt: skip
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    return [
        write_results(tmp_path / "base", ["0", "1", "=cmd()", "x", "a\rb", "y"]),
        write_results(tmp_path / "ours", ["0", "x", "<b>", "3", "a\r\nb", "5"]),
    ]


def run(*arguments):
    result = CliRunner().invoke(validate.app, [str(argument) for argument in arguments])
    return result.exit_code, f"{result.output}{result.exception!r}"


def test_a_judge_is_asked_once_for_each_answer(folders, judge, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    arguments = ["judge", *folders, "--model", "m", "--base-url", judge.url]
    judge.failures = [429]
    code, out = run(*arguments)
    assert code == 0 and "6 answers judged by m, 6,060 tokens" in out, out
    assert len(judge.bodies) == 13  # one was repeated
    assert judge.bodies[0]["auth"] == "Bearer key"
    assert judge.bodies[0]["response_format"]["json_schema"]["strict"]
    code, out = run(*arguments)
    assert code == 0 and "0 answers judged" in out and len(judge.bodies) == 13
    code, out = run("agree", *folders)
    assert code == 0 and "rules ~ m: kappa 1.000, equal 1.000 of 12" in out


def test_sheets_are_blind_and_come_back(folders, tmp_path):
    study = tmp_path / "study"
    assert run("sheet", *folders, "--items", "5", "--output", study)[0] == 0
    text = (study / "sheet.csv").read_text()
    assert "base" not in text and "ours" not in text
    with (study / "sheet.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 10 and not any(row["answer"].startswith("=") for row in rows)
    key = pd.read_csv(study / "key.csv").set_index("code")
    assert set(key["method"]) == set(folders)
    assert key.groupby(["task", "doc_id"]).size().eq(2).all()
    # The annotator agrees with the rules but for the first answer; the last is left open.
    for number, row in enumerate(rows[:-1]):
        right = (row["answer"] == row["reference"]) != (number == 0)
        row["verdict"] = "correct" if right else "Incorrect"
    filled = tmp_path / "anna.csv"
    pd.DataFrame(rows).to_csv(filled, index=False)
    code, out = run("agree", *folders, "--people", filled, "--key", study / "key.csv")
    assert code == 0 and "equal 0.889 of 9" in out, out
    rows[0]["verdict"] = "perhaps"
    pd.DataFrame(rows).to_csv(filled, index=False)
    code, out = run("agree", *folders, "--people", filled, "--key", study / "key.csv")
    assert code and "perhaps" in out
    assert run("sheet", *folders, "--output", study)[0]  # it may contain annotations
