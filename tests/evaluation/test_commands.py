"""`moe-finetune eval` from the command line to the files, on a tiny checkpoint."""

import csv
import json
import shutil

import pytest
import torch
import yaml

from moe_finetune import cli
from moe_finetune.evaluation.results import load_results
from tests.evaluation.local import write_suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suite"), items=7, shots=0)


@pytest.fixture(scope="module")
def results(checkpoint, suite, tmp_path_factory):
    """Two evaluations: every answer of the second one is right."""
    folder = tmp_path_factory.mktemp("results")
    arguments = [checkpoint, "-s", suite, "-o", folder / "base", "-b", "hf"]
    assert cli.main(["eval", *map(str, arguments)]) == 0
    shutil.copytree(folder / "base", folder / "ours")
    samples = folder / "ours" / load_results(folder / "ours")["tasks"]["sums"]["samples"]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for row in rows:
        row["replies"], row["metrics"] = [[row["target"]]], {"exact_match": 1.0}
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def study(results, tmp_path):
    """A copy that a test may add verdicts to."""
    return shutil.copytree(results, tmp_path / "results")


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = cli.main(["eval", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


# -- evaluating -------------------------------------------------------------------------------


def test_only_some_tasks(run, checkpoint, suite, tmp_path):
    chosen = [checkpoint, "-s", suite, "-o", tmp_path / "o", "-b", "hf", "--only", "colours"]
    code, out, err = run(*chosen, "--limit", "5", "--batch-size", "2")
    assert code == 0, err
    found = load_results(tmp_path / "o")
    assert list(found["tasks"]) == ["colours"] and found["tasks"]["colours"]["n"] == 5
    assert found["settings"]["batch_size"] == 2
    assert f"colours: acc {found['tasks']['colours']['value']:.4f} ±" in out and "(n=5)" in out


def test_prompts_that_are_too_long(run, checkpoint, tmp_path):
    suite = write_suite(tmp_path / "data", items=3, shots=0)
    rows = [{"question": "1+" * 4000, "answer": "7"}, {"question": "3+4=", "answer": "7"}]
    (suite.parent / "sums_test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    arguments = [checkpoint, "-s", suite, "-b", "hf", "--only", "sums"]
    code, _, err = run(*arguments, "-o", tmp_path / "stopped")
    assert code == 2 and "1 of 2 prompts" in err
    code, _, err = run(*arguments, "-o", tmp_path / "cut", "--overflow", "truncate")
    assert code == 0, err
    assert load_results(tmp_path / "cut")["tasks"]["sums"]["usage"]["overflowing"] == 1


def test_programs_run_without_a_sandbox_only_when_told(run, checkpoint, tmp_path, monkeypatch):
    row = {
        "task_id": "T/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n",
        "entry_point": "f", "test": "def check(c):\n    assert c(3) == 3\n",
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    task = {
        "task": "humaneval_local", "label": "code", "shots": 0, "metric": "pass@1",
        "filter": "sandbox", "code": "humaneval", "max_tokens": 4, "files": {"test": "rows.jsonl"},
    }  # fmt: skip
    suite = tmp_path / "code.yaml"
    suite.write_text(yaml.safe_dump({"name": "code", "tasks": [task]}))
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = [checkpoint, "-s", suite, "-b", "hf", "-o", tmp_path / "o"]
    code, out, err = run(*arguments)
    assert code == 0 and "generated, not scored" in err and "code: pass@1 not scored" in out
    code, out, err = run(*arguments, "--allow-unsafe-local")
    assert code == 0 and "WITHOUT a sandbox" in err and "code: pass@1 0.0000" in out
    found = load_results(tmp_path / "o")["tasks"]["code"]
    assert found["notes"] == ["programs ran without a sandbox"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-s", "paper9", "-o", "o"], "unknown suite 'paper9'; did you mean 'paper"),
        (["-s", "SUITE", "-o", "o", "--only", "sum"], "no task 'sum'; did you mean 'sums'"),
        (["-s", "SUITE", "-o", "o", "--data-dir", "nowhere"], "nowhere does not exist"),
        (["-s", "GONE", "-o", "o"], "colours_test.jsonl"),
        (["-o", "o"], "no suite; choose one with --suite"),
        (["--judge", "m"], "has no results.json; give the folder of an evaluation, or evaluate"),
        (["--sheets", "2", "-o", "o"], "has no results.json; give the folder of an evaluation"),
        (["-s", "SUITE"], "no folder for the results; set --output"),
        (["-s", "SUITE", "-o", "o", "--batch-size", "0"], "--batch-size 0: expected a number"),
        (["-s", "SUITE", "-o", "o", "--overflow", "cut"], "cut"),
        (["-s", "SUITE", "-o", "o", "--judge-url", "http://x"], "needs the judge's name"),
        (["-s", "SUITE", "-o", "o", "--annotations", "SUITE"], "--key FILE must be given together"),
        (["-s", "SUITE", "-o", "o", "--key", "nowhere.json"], "nowhere.json"),
        (["-s", "SUITE", "-o", "o", "--check", "--judge", "m"], "choose one"),
        (["-s", "SUITE", "-o", "o", "--parity", "hf"], "parity needs two different backends"),
        (["-s", "SUITE", "-o", "o", "--parity", "hff"], "hff"),
        (["other", "-s", "SUITE", "-o", "o"], "other has no results.json"),
    ],
)
def test_wrong_input_is_exit_code_2(run, checkpoint, suite, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(suite.parent, tmp_path / "gone")
    (tmp_path / "gone" / "colours_test.jsonl").unlink()
    paths = {"SUITE": suite, "GONE": tmp_path / "gone" / "local.yaml"}
    code, out, err = run(checkpoint, "-b", "hf", *(paths.get(a, a) for a in arguments))
    assert code == 2 and said in " ".join(err.split()) and not out
    assert not (tmp_path / "o").exists()


# -- check, parity ----------------------------------------------------------------------------


def test_check_asks_no_model(run, checkpoint, suite, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    code, out, _ = run(tmp_path / "model", "-s", suite, "--check", "--limit", "5")
    sums, colours = out.splitlines()
    assert code == 0 and "ready" in sums and "5 items, 5 requests" in sums
    assert "5 items, 15 requests" in colours


def test_check_does_not_fail_for_what_runs_elsewhere(run, checkpoint, tmp_path):
    suite = write_suite(tmp_path / "data", items=3)
    content = yaml.safe_load(suite.read_text())
    content["tasks"][0]["external"] = "run it with its own package"
    suite.write_text(yaml.safe_dump(content))
    code, out, _ = run(checkpoint, "-s", suite, "--check")
    assert code == 0 and "elsewhere   run it with its own package" in out


def test_parity(run, server, checkpoint, suite, tmp_path):
    arguments = [checkpoint, "-s", suite, "--base-url", server.url, "--limit", "6"]
    arguments += ["--parity", "hf", "--parity", "server"]
    code, out, err = run(*arguments, "-o", tmp_path / "equal")
    assert code == 0, err
    assert "sums: hf and server give 6 of 6 equal answers to 6 equal prompts" in out
    assert "colours: hf and server give 6 of 6" in out and "log-probabilities within" in out
    with torch.no_grad():
        server.model.lm_head.weight.copy_(server.model.lm_head.weight.flip(0))
    code, out, _ = run(*arguments, "-o", tmp_path / "unequal")
    assert code == 1 and "sums: hf and server give 0 of 6 equal answers" in out
    assert " against " in out
    found = json.loads((tmp_path / "unequal" / "parity.json").read_text())
    assert [line["n"] for line in found] == [6, 6]


# -- judge, people ----------------------------------------------------------------------------


def test_judge_after_evaluating(run, judge, checkpoint, suite, tmp_path):
    arguments = [checkpoint, "-s", suite, "-b", "hf", "-o", tmp_path / "o"]
    code, out, err = run(*arguments, "--judge", "m", "--judge-url", judge.url)
    assert code == 0, err
    assert "results: " in out and "o sums: judge m accepts 0.0000 of 7; 7 requests" in out
    assert len(judge.bodies) == 7


def test_judge_of_finished_results(run, judge, study):
    arguments = [study / "base", study / "ours", "--judge", "m", "--judge-url", judge.url]
    code, out, err = run(*arguments)
    assert code == 0, err
    # 7 requests of 1,000 tokens in and 10 out.
    assert "base sums: judge m accepts 0.0000 of 7; 7 requests, 7,000 tokens in, 70 out" in out
    assert "ours sums: judge m accepts 1.0000 of 7" in out
    table = [line.split() for line in out.partition("accepted by")[2].splitlines() if line]
    assert table == [
        ["base", "ours"],
        ["rules", "0", "of", "7", "7", "of", "7"],
        ["judge", "0", "of", "7", "7", "of", "7"],
        ["agreement", "kappa", "equal", "items"],
        ["rules", "~", "judge", "1.000", "1.000", "14"],
    ]
    code, out, _ = run(*arguments)
    assert code == 0 and "0 requests" in out and len(judge.bodies) == 14
    judge.fixed = "hard to say"
    code, _, err = run(*arguments[:2], "--judge", "n", "--judge-url", judge.url)
    assert code == 2 and "without a verdict; use" in err


def test_people(run, study, tmp_path):
    both = [study / "base", study / "ours"]
    code, out, err = run(*both, "--sheets", "5", "-o", tmp_path)
    assert code == 0, err
    folder = tmp_path / "sheets" / "sums"
    assert f"sheets: {folder / 'annotate.csv'} and annotate.html, 10 answers" in out
    with (folder / "annotate.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for number, row in enumerate(rows):
        # This annotator is as strict as the rules, but for the first answer.
        row["verdict"] = "yes" if (row["answer"] == row["reference"]) != (number == 0) else "no"
    filled = tmp_path / "anna.csv"
    with filled.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    key = folder / "key.json"
    code, out, err = run(*both, "--annotations", filled, "--key", key)
    assert code == 0, err
    # Rules 5 of 10, people one apart: agreement 0.9, chance 0.5, kappa 0.8.
    assert "rules ~ people  0.800  0.900  10" in out
    shutil.copy(filled, tmp_path / "bert.csv")
    two = ["--annotations", filled, "--annotations", tmp_path / "bert.csv", "--key", key]
    code, out, _ = run(*both, *two)
    assert code == 0 and "anna ~ bert   1.000  1.000  10" in out
    code, _, err = run(*both, "--sheets", "5", "-o", tmp_path)
    assert code == 2 and "may contain annotations" in err
    code, _, err = run(*both, "--annotations", folder / "annotate.csv", "--key", key)
    assert code == 2 and "no row has a verdict" in err
    key.write_text("{")
    code, _, err = run(*both, "--annotations", filled, "--key", key)
    assert code == 2 and "give the key.json that eval --sheets wrote" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "contains finished results; add --judge, --sheets or --annotations"),
        (["--sheets", "5", "--only", "sum"], "no task 'sum'; did you mean 'sums'"),
        (["--sheets", "5", "--only", "colours"], "no task with written answers"),
        (["nowhere", "--sheets", "5"], "that all contain results.json"),
    ],
)
def test_wrong_input_over_finished_results(run, results, tmp_path, arguments, said):
    code, out, err = run(results / "base", *arguments, "-o", tmp_path)
    assert code == 2 and said in err and not out
    assert not list(tmp_path.iterdir())
