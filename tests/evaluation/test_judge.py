import csv
import json
import threading

import pytest

from moe_finetune.errors import DataError, EvaluationError
from moe_finetune.evaluation.agreement import (
    agreement,
    agreement_table,
    judge_verdicts,
    rule_verdicts,
)
from moe_finetune.evaluation.exchange import retry_after
from moe_finetune.evaluation.human import import_annotations
from moe_finetune.evaluation.judge import Judge, parse_verdict
from moe_finetune.evaluation.validations import generation_tasks, judge_tasks, write_sheets
from tests.evaluation.judge_server import Server


@pytest.fixture
def server(judge):
    return judge


def write_results(folder, answers=("0", "1", "x"), label="sums"):
    """A folder of results with one task; returns its samples' file."""
    file = folder / "tasks" / "s" / "samples.jsonl"
    file.parent.mkdir(parents=True)
    task = {"task": "t", "metric": "exact_match", "filter": "strict-match",
            "samples": "tasks/s/samples.jsonl"}  # fmt: skip
    (folder / "results.json").write_text(json.dumps({"schema": 1, "tasks": {label: task}}))
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
    return file


def test_verdicts_are_structured_stored_and_counted(server, tmp_path):
    items = [(f"What is {i}?", str(i), answer) for i, answer in enumerate(["0", "1", "7", "3"])]
    with Judge("m", server.url, "key", tmp_path / "cache") as judge:
        verdicts = judge.judge_all(items)
        assert [verdict.correct for verdict in verdicts] == [True, True, False, True]
        assert (judge.requests, judge.prompt_tokens, judge.completion_tokens) == (4, 4000, 40)
    body = server.bodies[0]
    assert body["model"] == "m" and body["temperature"] == 0 and body["auth"] == "Bearer key"
    assert body["response_format"]["json_schema"]["strict"]
    with Judge("m", server.url, "key", tmp_path / "cache") as judge:
        assert [verdict.correct for verdict in judge.judge_all(items)] == [True, True, False, True]
        assert (judge.requests, judge.prompt_tokens) == (0, 0)
    with pytest.raises(EvaluationError, match="another checkpoint or other settings"):
        Judge("another", server.url, cache=tmp_path / "cache")


def test_overload_is_retried_and_refusal_is_not(server):
    judge = Judge("m", server.url, retries=3)
    server.failures = [429, 429]
    assert judge.judge("q", "4", "4").correct
    assert len(server.bodies) == 3
    server.bodies.clear()
    server.failures = [429] * 9
    with pytest.raises(EvaluationError, match="HTTP 429"):
        judge.judge("q", "4", "4")
    assert len(server.bodies) == 4
    server.bodies.clear()
    server.failures, server.retry_after = [429], "3600"
    with pytest.raises(EvaluationError, match=r"asks to wait 3600 s .HTTP 429.*repeat the command"):
        judge.judge("q", "4", "4")
    assert len(server.bodies) == 1
    server.bodies.clear()
    server.failures = [401]
    with pytest.raises(EvaluationError, match="HTTP 401"):
        judge.judge("q", "4", "4")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("60", 60.0), ("-5", 0.0), ("1e999", None), ("nan", None), ("soon", None), (None, None)],
)
def test_the_wait_that_a_server_asks_for(header, seconds):
    assert retry_after(header) == seconds
    assert 0 < retry_after("Sun, 22 Nov 2099 00:00:00 GMT") < 1e10


def test_a_redirect_is_refused_and_gets_no_key(server):
    with Server() as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        server.elsewhere = f"{other.url}/chat/completions"
        try:
            server.failures = [307]
            with pytest.raises(EvaluationError, match=f"HTTP 307: it redirects to {other.url}"):
                Judge("m", server.url, "key").judge("q", "4", "4")
        finally:
            other.shutdown()
            thread.join()
        assert other.bodies == []
    assert [body["auth"] for body in server.bodies] == ["Bearer key"]


@pytest.mark.parametrize(
    ("content", "usage"),
    [(7, {}), ("{}", {"prompt_tokens": "many"}), ("{}", [1])],
)  # fmt: skip
def test_a_reply_of_another_form_is_refused(server, content, usage):
    server.fixed, server.usage = content, usage
    with pytest.raises(EvaluationError, match="does not answer like an OpenAI-compatible server"):
        Judge("m", server.url).judge("q", "4", "4")


def test_nonsense_is_a_clear_error(server):
    judge = Judge("m", server.url)
    server.fixed = "I think it is correct!"
    with pytest.raises(
        EvaluationError, match="answered 'I think it is correct!' without a verdict"
    ):
        judge.judge("q", "4", "4")
    assert len(server.bodies) == 3
    with pytest.raises(EvaluationError, match="failed"):
        Judge("m", "http://127.0.0.1:9/v1", retries=0).judge("q", "4", "4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"verdict": "correct", "reason": "same"}', (True, "same")),
        ('```json\n{"verdict": "incorrect", "reason": ""}\n```', (False, "")),
        ('{"verdict": "yes"}', None),
        ("correct", None),
        ('The verdict: {"verdict": "correct"}', None),
        ("[1]", None),
        ("", None),
    ],
)
def test_parsing_takes_verdicts_only(text, expected):
    assert parse_verdict(text) == expected


def test_sheets_are_blind_and_come_back(tmp_path, server):
    write_results(tmp_path / "base", ["0", "1", "=cmd()", "x", "4", "y"])
    write_results(tmp_path / "ours", ["0", "x", "<b>", "3", "x", "5"])
    tasks = generation_tasks([tmp_path / "base", tmp_path / "ours"])
    (sheets,) = write_sheets(tasks, tmp_path / "sheets", 5)
    assert sheets.n == 10 and sheets.csv == tmp_path / "sheets" / "sums" / "annotate.csv"
    text = sheets.csv.read_text() + sheets.html.read_text()
    assert "base" not in text and "ours" not in text
    assert "'=cmd()" in sheets.csv.read_text() and "&lt;b&gt;" in sheets.html.read_text()
    codes = json.loads(sheets.key.read_text())
    assert {c["method"] for c in codes.values()} == {"base", "ours"}
    # The annotator agrees with the rules, except about one item.
    rules = rule_verdicts(tasks[0]) | rule_verdicts(tasks[1])
    lines = ["id,verdict,comment"]
    for i, (code, c) in enumerate(codes.items()):
        truth = rules[(c["method"], c["task"], c["doc_id"])]
        lines.append(f"{code},{'correct' if truth != (i == 0) else 'no'},")
    filled = tmp_path / "filled.csv"
    filled.write_text("\n".join(lines) + "\n")
    people = import_annotations(filled, sheets.key)
    assert len(people) == 10
    assert len(list(judge_tasks(tasks, "m", server.url))) == 2
    judged = judge_verdicts(tasks[0]) | judge_verdicts(tasks[1])
    found = agreement({"rules": rules, "judge": judged, "people": people})
    assert found["rules ~ judge"] == {"kappa": 1.0, "agreement": 1.0, "n": 12}
    assert found["rules ~ people"]["agreement"] == 0.9 and found["rules ~ people"]["n"] == 10
    filled.write_text("id,verdict\n" + next(iter(codes)) + ",perhaps\n")
    with pytest.raises(DataError, match="line 2: verdict 'perhaps'"):
        import_annotations(filled, sheets.key)
    filled.write_text("id,verdict\nffff,yes\n")
    with pytest.raises(DataError, match="line 2: id 'ffff'"):
        import_annotations(filled, sheets.key)


def test_answers_of_any_characters_stay_one_row(tmp_path):
    answers = ["a\rb", "a\nb", 'a"b', "a,b", "", "a\r\nb", "\u2028"]
    write_results(tmp_path / "m", answers)
    (sheets,) = write_sheets(generation_tasks([tmp_path / "m"]), tmp_path / "s", 9)
    with sheets.csv.open(newline="", encoding="utf-8") as stream:
        assert sorted(row["answer"] for row in csv.DictReader(stream)) == sorted(answers)
    assert import_annotations(sheets.csv, sheets.key) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replies": []}, "have no answer"),
        ({"filter": None}, "no field 'filter'"),
        ({"replies": [["a"], 3], "doc": []}, "doc is not an object"),
        ({"metrics": {}}, "has no metric 'exact_match'"),
        ({"metrics": None}, "item 2: metrics must be an object"),
    ],
)
def test_damaged_samples_are_named(tmp_path, server, change, said):
    file = write_results(tmp_path / "r")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    place = -1 if "metrics" in change else 0
    rows[place] |= change
    if "filter" in change:
        del rows[place]["filter"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises((DataError, EvaluationError), match=said):
        tasks = generation_tasks([tmp_path / "r"])
        list(judge_tasks(tasks, "m", server.url))
        agreement_table(tasks)


@pytest.mark.parametrize("user", ["user:pw@", "user@"])
def test_an_address_with_a_password_is_refused_and_not_repeated(user):
    with pytest.raises(EvaluationError, match=r"judge.*OPENAI_API_KEY") as problem:
        Judge("m", f"http://{user}127.0.0.1:9/v1")
    assert "pw" not in str(problem.value) and "127.0.0.1" in str(problem.value)


@pytest.mark.parametrize("url", ["", "http://[", "http://h:99999", "file:///x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(EvaluationError, match="is not an http address"):
        Judge("m", url)


def test_a_key_that_no_header_may_have_is_refused(server):
    judge = Judge("m", server.url, "a\nKey: b")
    with pytest.raises(EvaluationError, match="the request cannot be sent"):
        judge.judge("q", "4", "4")
