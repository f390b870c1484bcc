"""What is wrong with a suite and its rows is said before a model is asked, with its place."""

import json
import shutil
from random import getstate
from types import SimpleNamespace

import pytest
import yaml

from moe_finetune import cli
from moe_finetune.errors import DataError, EvaluationError
from moe_finetune.evaluation.backends import Backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.suite_lines import ready_lines
from moe_finetune.evaluation.suites import Suite
from moe_finetune.evaluation.what_can_run import check_suite
from tests.support import tiny

EXACT = {"task": "sums", "template": "local_exact_match", "shots": 0, "metric": "exact_match"}
CHOICE = {"task": "words", "template": "local_loglikelihood", "shots": 0, "metric": "acc"}


def write(folder, rows, name="rows.jsonl"):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("".join(line + "\n" for line in lines))
    return {"test": name}


def nobody(output) -> dict:
    """Arguments of an evaluation that may not ask anything."""
    return {
        "output": output, "progress": False, "opened": Backend("none", None, "x", "x", {}, 1)
    }  # fmt: skip


def refused(folder, task, error, said):
    """The check says it, and an evaluation does before it asks or writes."""
    suite = Suite(name="s", tasks=[task], folder=folder)
    (found,) = check_suite(suite)
    assert not found.runnable and said in found.problem, found.problem
    with pytest.raises(error) as raised:
        evaluate("x", suite, **nobody(folder / "out"))
    assert said in str(raised.value)
    assert not (folder / "out").exists()


ROW = {"question": "3+4=", "answer": "7"}
WORDS = {"question": "It is", "choices": ["red", "green", "blue"], "answer": 1}


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        (EXACT, {"question": "3+4="}, ":3: 'answer' must be a text or a number, not None"),
        (EXACT, ROW | {"answer": None}, ":3: 'answer' must be a text or a number, not None"),
        (EXACT, ROW | {"answer": True}, ":3: 'answer' must be a text or a number, not True"),
        (EXACT, ROW | {"answer": " "}, ":3: 'answer' is empty"),
        (EXACT, ROW | {"answer": "7\n8"}, ":3: 'answer' has a line break"),
        (EXACT, ROW | {"question": 5}, ":3: 'question' must be a text, not 5"),
        (EXACT, {"answer": "7"}, ":3: 'question' must be a text, not None"),
        (EXACT, ROW, None),
        (EXACT, ROW | {"answer": 7}, None),
        (CHOICE, WORDS | {"answer": 3}, ":3: 'answer' is 3, which is neither one of the"),
        (CHOICE, WORDS | {"answer": -1}, "an index from 0 to 2"),
        (CHOICE, WORDS | {"answer": 0.5}, ":3: 'answer' is 0.5"),
        (CHOICE, WORDS | {"answer": "grey"}, ":3: 'answer' is 'grey'"),
        (CHOICE, WORDS | {"answer": True}, ":3: 'answer' is True"),
        (CHOICE, WORDS | {"choices": ["red", 5]}, ":3: 'choices' must be texts, and one is 5"),
        (CHOICE, WORDS | {"choices": "red"}, ":3: 'choices' must be a list of two or more"),
        (CHOICE, WORDS | {"answer": "blue"}, None),
    ],
)
def test_rows_of_the_templates(tmp_path, task, row, said):
    good = ROW if task is EXACT else WORDS
    files = write(tmp_path, [good, "", row, good])
    if said is None:
        suite, drawn = Suite(name="s", tasks=[task | {"files": files}], folder=tmp_path), getstate()
        ready_lines(suite)
        assert getstate() == drawn, "a run draws what it drew without a rehearsal"
        (found,) = check_suite(suite)
        assert found.runnable and found.items == 3
    else:
        refused(tmp_path, task | {"files": files}, DataError, said)


def test_rows_of_other_tasks_have_one_type_a_field(tmp_path):
    task = {"task": "gsm8k_local", "shots": 0, "metric": "exact_match",
            "filter": "flexible-extract"}  # fmt: skip
    good = {"question": "3+4?", "answer": "#### 7"}
    files = write(tmp_path, [good, good, good | {"answer": 7}])
    said = "rows.jsonl:3: field 'answer' is 7 where the first row has '#### 7'"
    refused(tmp_path, task | {"files": files}, DataError, said)
    files = write(tmp_path, [good, {"question": "3+4?"}])
    refused(tmp_path, task | {"files": files}, DataError, ":2: no field 'answer'")


def test_examples_are_never_the_tested_rows_in_silence(tmp_path):
    files = write(tmp_path, [ROW] * 5)
    said = "has shots: 2 but only the tested rows to take them from"
    refused(tmp_path, EXACT | {"shots": 2, "files": files}, EvaluationError, said)
    both = files | {"train": write(tmp_path, [ROW] * 2, "train.jsonl")["test"]}
    (found,) = check_suite(
        Suite(name="s", tasks=[EXACT | {"shots": 2, "files": both}], folder=tmp_path)
    )
    assert found.runnable, found.problem
    said = "train.jsonl: 2 rows, too few for shots: 3 of task 'sums'"
    refused(tmp_path, EXACT | {"shots": 3, "files": both}, DataError, said)
    gsm8k = {"task": "gsm8k_local", "metric": "exact_match", "filter": "strict-match"}
    said = "has a local file for 'test' and none for 'train', where its examples come from"
    refused(tmp_path, gsm8k | {"shots": 2, "files": files}, EvaluationError, said)
    said = "no split 'tset' under files; did you mean 'test'?"
    refused(tmp_path, EXACT | {"files": files | {"tset": "x"}}, EvaluationError, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metric": "acc"}, "no metric 'acc' with filter 'none'; it reports exact_match with"),
        ({"filter": "strict"}, "no metric 'exact_match' with filter 'strict'; it reports exact"),
        ({"task": "gsm8k_local", "template": None}, "exact_match with filter flexible-extract"),
        ({"task": "humaneval_local", "template": None, "code": "humaneval"},
         "it reports pass@1 with filter sandbox"),
    ],
)  # fmt: skip
def test_a_metric_that_the_task_does_not_report(tmp_path, change, said):
    program = {"prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"}
    files = write(tmp_path, [ROW | program])
    refused(tmp_path, EXACT | {"files": files} | change, EvaluationError, said)


def test_rows_that_the_task_cannot_read(tmp_path):
    task = {"task": "gsm8k_local", "shots": 0, "metric": "exact_match", "filter": "strict-match"}
    files = write(tmp_path, [{"query": "3+4?", "answer": "#### 7"}])
    said = "task 'gsm8k_local': lm-eval cannot ask it (UndefinedError: 'question' is undefined)"
    refused(tmp_path, task | {"files": files}, EvaluationError, said)
    program = {"prompt": "def f():\n", "canonical_solution": "", "entry_point": "f"}
    task = {"task": "humaneval_local", "shots": 0, "metric": "pass@1", "filter": "sandbox",
            "code": "humaneval", "files": write(tmp_path, [program])}  # fmt: skip
    refused(tmp_path, task, DataError, "item 0: the item has no 'test' for form 'humaneval'")


TASK = {
    "task": "kinds",
    "dataset_path": "kinds",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "{{c}}",
    "doc_to_target": "a",
}
SUM = {key: value for key, value in TASK.items() if key != "doc_to_choice"} | {
    "task": "sum",
    "output_type": "generate_until",
    "doc_to_target": "{{100 // a}}",
    "generation_kwargs": {"until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of own tasks: two, a group that contains itself, and one of an unknown task."""
    for folder in ("tasks", "suites"):
        (tmp_path / "own" / folder).mkdir(parents=True)
    groups = [{"group": "round", "task": ["kinds", "again"]}, {"group": "again", "task": ["round"]},
              {"group": "odd", "task": ["kinds", "kind"]}]  # fmt: skip
    for number, content in enumerate([TASK, SUM, *groups]):
        (tmp_path / f"own/tasks/{number}.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("MOE_FINETUNE_EVAL", str(tmp_path / "own"))
    return tmp_path


@pytest.mark.parametrize("label", ["1", "grey", 3, -1])
def test_labels_that_are_no_choice(own, label):
    """lm-eval scores them 0, and warns in a log."""
    row = {"q": "It is", "c": ["red", "green", "blue"]}
    good = row | {"a": "red" if isinstance(label, str) else 2}
    task = {"task": "kinds", "shots": 0, "metric": "acc"}
    files = write(own, [good, row | {"a": label}])
    said = f"item 2 of {own / 'rows.jsonl'}: its answer {label!r} is none of its 3 choices, nor a "
    refused(own, task | {"files": files}, EvaluationError, said)
    suite = Suite(name="s", tasks=[task | {"files": write(own, [good, good])}], folder=own)
    assert check_suite(suite)[0].runnable


def test_labels_in_csv_are_texts(own):
    (own / "rows.csv").write_text("q,c,a\nIt is,\"['red', 'blue']\",1\n")
    task = {"task": "kinds", "shots": 0, "metric": "acc", "files": {"test": "rows.csv"}}
    refused(own, task, EvaluationError, "number from 0 to 1; CSV has no numbers, so use .jsonl")


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("round", "group 'again' contains itself"),
        ("odd", "group 'odd' names 'kind', which is no task"),
    ],
)
def test_groups_that_cannot_be_followed(own, group, said):
    refused(own, {"task": group, "metric": "acc"}, EvaluationError, said)


def test_a_chat_without_a_template(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    task = EXACT | {"files": write(tmp_path, [ROW]), "chat": True}
    suite = Suite(name="s", tasks=[EXACT | {"label": "plain", "files": task["files"]}, task],
                  folder=tmp_path)  # fmt: skip
    plain, chat = check_suite(suite, tokenizer=tokenizer)
    assert plain.runnable and not chat.runnable and "set chat: false" in chat.problem
    opened = Backend("none", SimpleNamespace(tokenizer=tokenizer), "x", "x", {}, 1)
    with pytest.raises(EvaluationError, match="task 'sums': chat: true, but"):
        evaluate("x", suite, output=tmp_path / "out", progress=False, opened=opened)


def test_the_tokenizer_of_a_run_is_asked_before_it_trains(tmp_path, checkpoint, capsys):
    """A chat that it cannot render, and an answer longer than a reply."""
    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    (base / "chat_template.jinja").unlink()
    write(tmp_path, [{"text": f"{n} and {n + 1}"} for n in range(9)], "train.jsonl")
    for change, said in [
        ({"chat": True}, "task 'sums': chat: true, but the checkpoint's tokenizer cannot render"),
        ({"max_tokens": 4}, "item 2 of"),
    ]:
        files = write(tmp_path, [ROW, ROW | {"answer": "1234567"}])
        task = EXACT | {"files": files} | change
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": [task]}))
        recipe = {
            "model": {"path": str(base)}, "data": {"train": str(tmp_path / "train.jsonl")},
            "trainer": {"max_steps": 1, "use_cpu": True}, "lora": {"rank": 4},
            "evaluation": {"suite": str(tmp_path / "s.yaml"), "backend": "hf"},
        }  # fmt: skip
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
        arguments = ["train", str(tmp_path / "r.yaml"), "--output", str(tmp_path / "run")]
        assert cli.main(arguments) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("cap", "fits"), [({}, False), ({"max_tokens": 41}, True)])
def test_an_answer_that_is_longer_than_a_reply(tmp_path, cap, fits):
    files = write(tmp_path, [ROW, ROW | {"answer": "7" * 33}, ROW | {"answer": "8" * 41}])
    suite = Suite(name="s", tasks=[EXACT | {"files": files} | cap], folder=tmp_path)
    (check,) = check_suite(suite, tokenizer=tiny.tokenizer())
    assert check.runnable is fits
    said = (
        "rows.jsonl: its answer has 33 tokens, a reply at most 32, so 2 of 3 answers can never "
        "be given; set max_tokens: 41"
    )
    assert fits or ("task 'sums': item 2 of" in check.problem and said in check.problem)
    opened = Backend("none", SimpleNamespace(tokenizer=tiny.tokenizer()), "x", "x", {}, 1)
    if not fits:
        with pytest.raises(EvaluationError, match="set max_tokens: 41"):
            evaluate("x", suite, output=tmp_path / "out", progress=False, opened=opened)


def test_an_answer_that_is_null(own):
    """Where a task's file writes it into a text, it would be the text None."""
    (own / "own/tasks/null.yaml").write_text(
        yaml.safe_dump(SUM | {"task": "nothing", "doc_to_target": "{{a}}"})
    )
    files = write(own, [{"q": "1+1=", "a": "2"}, {"q": "1+2=", "a": None}])
    task = {"task": "nothing", "shots": 0, "metric": "exact_match", "files": files}
    refused(own, task, EvaluationError, "rows.jsonl: 'a', its answer, is null")


def test_a_setting_of_generation_that_no_backend_knows(own):
    settings = {"until": ["\n"], "max_gen_tokens": 5}
    (own / "own/tasks/long.yaml").write_text(
        yaml.safe_dump(SUM | {"task": "long", "generation_kwargs": settings})
    )
    files = write(own, [{"q": "1+1=", "a": 2}])
    task = {"task": "long", "shots": 0, "metric": "exact_match", "files": files}
    said = "have 'max_gen_tokens', which no backend knows; did you mean 'max_gen_toks'?"
    refused(own, task, EvaluationError, said)


def test_two_files_of_one_task(own):
    (own / "own/tasks/twice.yaml").write_text(yaml.safe_dump(SUM | {"doc_to_target": "{{a}}"}))
    task = {"task": "sum", "metric": "exact_match", "files": write(own, [{"q": "1", "a": 1}])}
    said = "own/tasks/twice.yaml: its task 'sum' is in"
    refused(own, task, EvaluationError, said)


def test_a_later_row_and_a_changed_metric(own, checkpoint):
    """What the first items do not show ends the run with its task, and keeps what was done."""
    rows = [{"q": f"{n}+1=", "c": ["x", "y"], "a": n % 2} for n in range(5)]
    fine = {"task": "kinds", "shots": 0, "metric": "acc", "files": write(own, rows)}
    files = write(own, [row | {"a": 1 - n // 4} for n, row in enumerate(rows)], "late.jsonl")
    late = {"task": "sum", "shots": 0, "metric": "exact_match", "files": files}
    output, suite = own / "out", Suite(name="s", tasks=[fine, late], folder=own)
    with pytest.raises(EvaluationError, match=r"'sum': lm-eval cannot ask it \(ZeroDivisionError"):
        evaluate(checkpoint, suite, output=output, progress=False, backend="hf")
    results = json.loads((output / "results.json").read_text())
    assert list(results["tasks"]) == ["kinds"] and results["unfinished"] == ["sum"]
    suite = Suite(name="s", tasks=[fine | {"metric": "ac"}], folder=own)
    with pytest.raises(EvaluationError, match="reports no metric 'ac'"):
        evaluate(checkpoint, suite, output=output, progress=False, backend="hf")


def test_from_the_command_line(tmp_path, checkpoint, capsys):
    files = write(tmp_path, [ROW, ROW | {"answer": None}])
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "tasks": [EXACT | {"files": files}]}))
    arguments = ["eval", str(checkpoint), "-s", str(path), "-b", "hf", "-o", str(tmp_path / "o")]
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "rows.jsonl:2: 'answer' must be" in err and "Traceback" not in err
    assert cli.main([*arguments, "--check"]) == 2
    assert "rows.jsonl:2: 'answer' must be" in capsys.readouterr().out


def test_a_data_set_that_the_hub_does_not_give(tmp_path, monkeypatch):
    """Before training, too: a benchmark that is not there is found at the start."""
    asked = []

    def builder(path, name, **_):
        asked.append((path, name))
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", builder)
    task = {"task": "math500_boxed", "metric": "exact_match"}
    said = "the hub dataset 'HuggingFaceH4/MATH-500' is not available (Couldn't reach"
    refused(tmp_path, task, DataError, said)
    assert set(asked) == {("HuggingFaceH4/MATH-500", "default")}
    with pytest.raises(DataError, match=r"HuggingFaceH4/MATH-500/default/SPLIT\.jsonl"):
        ready_lines(Suite(name="s", tasks=[task]))


def test_an_offline_benchmark_stops_a_run_before_it_trains(tmp_path, checkpoint, capsys):
    rows = [{"text": f"{n} and {n + 1}"} for n in range(9)]
    write(tmp_path, rows, "train.jsonl")
    recipe = {
        "model": {"path": str(checkpoint)}, "data": {"train": str(tmp_path / "train.jsonl")},
        "trainer": {"max_steps": 1, "use_cpu": True}, "lora": {"rank": 4},
        "evaluation": {"suite": "gsm8k", "backend": "hf"},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["train", str(tmp_path / "r.yaml"), "--output", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "task gsm8k_local: the hub dataset 'openai/gsm8k'" in err
    assert not (tmp_path / "run").exists()
