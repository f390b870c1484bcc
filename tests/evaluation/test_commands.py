"""`moe-finetune eval` from the command line to the files, on a tiny checkpoint."""

import json
import os
import shutil

import pytest
import yaml

from moe_finetune import cli
from moe_finetune.cli.evaluation import malformed
from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.results import SCHEMA, load_results
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.run_folder import RunFolder
from tests.evaluation.local import write_suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suite"), items=7, shots=0)


@pytest.fixture
def run(capfd):
    def call(*arguments):
        code = cli.main(["eval", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_a_runs_scores_reach_its_page(run, checkpoint, suite, tmp_path):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(checkpoint, folder.merged)
    folder.recipe.write_text("model: {path: m}\n")
    code, out, err = run(folder.path, "-s", suite, "-b", "hf", "--limit", "2")
    assert code == 0, err
    assert f"results: {folder.results}" in out and f"report: {folder.page}" in out
    assert "sums" in folder.page.read_text()
    other = tmp_path / "elsewhere"
    code, out, _ = run(folder.path, "-s", suite, "-b", "hf", "--limit", "2", "-o", other)
    assert code == 0 and f"'compare {folder.path}' show those in {folder.evaluation}" in out
    two = write_suite(tmp_path / "two", items=3, shots=0)
    two = two.rename(two.with_name("two.yaml"))
    two.write_text(two.read_text().replace("name: local", "name: two"))
    code, _, err = run(folder.path, "-s", two, "-b", "hf")
    assert code == 2 and "has the scores of suite local; name another folder" in err


def test_only_some_tasks(run, checkpoint, suite, tmp_path):
    chosen = [checkpoint, "-s", suite, "-o", tmp_path / "o", "-b", "hf", "--only", "colours"]
    code, out, err = run(*chosen, "--limit", "5", "--batch-size", "2")
    assert code == 0, err
    found = load_results(tmp_path / "o")
    assert list(found["tasks"]) == ["colours"] and found["tasks"]["colours"]["n"] == 5
    assert found["settings"]["batch_size"] == 2
    assert f"colours: acc {found['tasks']['colours']['value']:.4f} ±" in out and "(n=5)" in out


def test_what_libraries_print_goes_to_a_log(run, checkpoint, suite, tmp_path, monkeypatch):
    from moe_finetune.evaluation import engine

    evaluate = engine.evaluate

    def noisy(*args, **kwargs):
        os.write(2, b"a library's bar 100%\n")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(engine, "evaluate", noisy)
    arguments = [checkpoint, "-s", suite, "-b", "hf", "-o", tmp_path / "o", "--limit", "2"]
    code, out, err = run(*arguments)
    assert code == 0 and "sums: exact_match" in out and "bar" not in err + out
    log = (tmp_path / "o" / "eval.log").read_text()
    assert "a library's bar 100%" in log
    code, _, err = run(*arguments, "--dtype", "int3")
    assert code == 2 and f"library output: {tmp_path / 'o' / 'eval.log'}" in err


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
        (["-o", "o"], "--suite: name the suite to evaluate"),
        (["-s", "SUITE"], "--output: name the folder for the results"),
        (["-s", "SUITE", "-o", "o", "--batch-size", "0"], "--batch-size 0: expected a number"),
        (["-s", "SUITE", "-o", "o", "--overflow", "cut"], "cut"),
        (["other", "-s", "SUITE", "-o", "o"], "unexpected extra argument(s) (other)"),
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


def test_check_asks_no_model(run, checkpoint, suite, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    code, out, _ = run(tmp_path / "model", "-s", suite, "--check", "--limit", "5")
    sums, colours = out.splitlines()
    assert code == 0 and "ready" in sums and "5 items, 5 requests" in sums
    assert "5 items, 15 requests" in colours


def test_what_other_packages_evaluate_is_said_with_the_scores(run, checkpoint, tmp_path):
    suite = write_suite(tmp_path / "data", items=3)
    content = yaml.safe_load(suite.read_text())
    suite.write_text(yaml.safe_dump(content | {"external": "2 of 3 here: run the third elsewhere"}))
    code, out, _ = run(checkpoint, "-s", suite, "--check")
    assert code == 0 and out.endswith("2 of 3 here: run the third elsewhere\n")
    code, out, _ = run(checkpoint, "-s", suite, "-b", "hf", "-o", tmp_path / "o")
    assert code == 0 and "\n2 of 3 here: run the third elsewhere\n" in out
    results = load_results(tmp_path / "o")
    assert results["suite"]["external"].startswith("2 of 3 here")


def test_the_first_wrong_reply_is_shown_where_none_was_right(tmp_path):
    """A run trained on chats answered bare questions, and only the score 0 was printed."""
    rows = {"sums": ([["Hello"]], 0.0), "colors": ([[[-3.0, False]]], 0.0), "words": ([["y"]], 0.5)}
    tasks = {}
    for label, (replies, value) in rows.items():
        (tmp_path / f"{label}.jsonl").write_text(json.dumps({"replies": replies}) + "\n")
        tasks[label] = {"samples": f"{label}.jsonl", "value": value}
    (line,) = malformed(tmp_path, {"tasks": tasks}, trained_on_chats=False)
    assert line.startswith("sums: no reply was right; the first wrong reply is 'Hello'")
    assert "chat: true" in line


@pytest.mark.parametrize(
    ("replies", "chats", "chat", "problem"),
    [
        (["4", "", " \n", "<|im_start|>user"], False, False, "3 of 4 replies are empty or have no"),
        (["4", "5", "6", ""], False, False, None),
        (["4", "5", "6", "7"], True, False, "the run was trained on chats"),
        (["4", "", "", ""], True, True, None),
    ],
)
def test_replies_of_the_wrong_form_are_said_where_some_are_right(
    tmp_path, replies, chats, chat, problem
):
    """A run of chats that was asked bare questions got 1 of 4, without a word."""
    rows = [{"replies": [[text]], "metrics": {"em": float(text == "4")}} for text in replies]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"samples": "s.jsonl", "value": 0.25, "n": 4, "metric": "em", "chat": chat}
    lines = list(malformed(tmp_path, {"tasks": {"sums": task}}, chats))
    assert [line.startswith(f"sums: {problem}") for line in lines] == [True] * (problem is not None)
    assert all(f"the first wrong reply is {replies[1]!r}" in line for line in lines)
    if chat and chats:  # the advice is the other one where chats were asked
        task["value"] = 0.0
        (line,) = malformed(tmp_path, {"tasks": {"sums": task}}, chats)
        assert "needs chat: false in the suite" in line


def test_a_suite_file_given_by_its_name_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.yaml").touch()
    with pytest.raises(EvaluationError, match="unknown suite 'held'; for the file here, give held"):
        load_suite("held")


def test_results_with_one_wrong_value_are_refused_by_its_key(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"schema": SCHEMA, "tasks": 4}))
    with pytest.raises(EvaluationError, match=r"results\.json: tasks: .*evaluate again"):
        load_results(file)
