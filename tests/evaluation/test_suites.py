"""The suites: their tasks and files, and what is missing. lm-eval's tasks are indexed here only."""

import functools
import json
import logging
from collections import defaultdict

import pytest

from moe_finetune.errors import DataError, DependencyError, EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.lm_eval_results import task_result
from moe_finetune.evaluation.lm_eval_tasks import Leaf
from moe_finetune.evaluation.programs import human_eval_program, mbpp_program, scored_by
from moe_finetune.evaluation.results import load_samples
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.evaluation.suite_lines import lines_of
from moe_finetune.evaluation.suites import Suite, SuiteTask, load_suite, suite_names
from moe_finetune.evaluation.what_can_run import check_suite, render_checks
from tests.evaluation.local import write_suite
from tests.evaluation.made_rows import Oracle, made_rows

PAPERS = {"paper0": 10, "paper1": 15, "paper1_qwen3": 10, "paper2": 17}


@pytest.fixture(scope="module")
def backend(checkpoint):
    with open_backend(checkpoint, "hf") as opened:
        yield opened


@pytest.mark.slow
def test_every_suite_names_installed_tasks_of_its_versions():
    assert set(suite_names()) >= {*PAPERS, "demo", "gsm8k", "humaneval"}
    for name, count in PAPERS.items():
        suite = load_suite(name)
        assert len(suite.tasks) == count
        assert all(t.source and t.metric for t in suite.tasks)
    every = {t.label: t for name in suite_names() for t in load_suite(name).tasks}
    suite = Suite(name="all", tasks=[task for task in every.values() if not task.template])
    leaves = {line.entry.label: line.leaves for line in lines_of(suite)}
    assert len(leaves["mmlu"]) == 57
    assert len(leaves["bbh"]) == 27
    domains = [leaf.name for k in leaves if k.startswith("mmlu_") for leaf in leaves[k]
               if k != "mmlu_pro" and not every[k].aggregate]  # fmt: skip
    assert sorted(domains) == sorted(leaf.name for leaf in leaves["mmlu"])
    for label, found in leaves.items():
        task = every[label]
        if task.code or task.aggregate or len(found) > 1:
            continue
        config = found[0].config
        metrics = {m["metric"] for m in config["metric_list"] if isinstance(m["metric"], str)}
        assert task.metric in metrics | {"acc"}, label
        filters = {f["name"] for f in config.get("filter_list") or [{"name": "none"}]}
        assert task.filter in filters, label


def test_check_says_what_runs_and_what_is_missing(data_folder):
    (gsm8k,) = check_suite("gsm8k", data_folder)
    assert gsm8k.runnable and (gsm8k.items, gsm8k.requests) == (1319, 1319)
    (short,) = check_suite("gsm8k", data_folder, limit=100)
    assert short.items == 100
    assert short.prompt_tokens == pytest.approx(gsm8k.prompt_tokens * 100 / 1319, rel=0.01)
    (code,) = check_suite("humaneval", data_folder, allow_unsafe_local=True)
    assert code.runnable and code.items == 164 and code.reply_tokens == 164 * 1024


def test_check_lists_missing_files(tmp_path):
    suite = write_suite(tmp_path / "suite", items=5)
    (tmp_path / "suite" / "colours_test.jsonl").unlink()
    sums, colours = check_suite(suite, tmp_path / "suite")
    assert sums.runnable and sums.items == 5
    assert not colours.runnable
    assert colours.missing == [str(tmp_path / "suite" / "colours_test.jsonl")]
    text = render_checks([sums, colours])
    assert "cannot run" in text and "missing: " in text and "5 items, 5 requests" in text
    with pytest.raises(DataError, match=r"data folder .* does not exist"):
        check_suite(suite, tmp_path / "nowhere")


def test_token_estimate_is_exact_when_all_items_are_sampled(tmp_path, backend):
    suite = write_suite(tmp_path / "suite", items=9)
    sums, colours = check_suite(suite, tmp_path / "suite", backend.lm.tokenizer)
    results = evaluate("x", suite, "hf", tmp_path / "out", opened=backend, progress=False)
    assert results["tasks"]["colours"]["usage"]["tokens"] == colours.prompt_tokens
    assert results["tasks"]["colours"]["usage"]["requests"] == colours.requests
    replied = results["tasks"]["sums"]["usage"]["tokens"] - sums.prompt_tokens
    assert 0 <= replied <= 9 * 6 * 4


@pytest.mark.slow
def test_a_hub_task_reads_the_documented_folder(tmp_path, backend):
    """BoolQ from lm-eval's own task file, its rows under the hub id."""
    folder = tmp_path / "data" / "aps" / "super_glue" / "boolq"
    folder.mkdir(parents=True)
    rows = [
        {"question": f"is {i} even", "passage": f"{i} was counted.", "idx": i, "label": i % 2}
        for i in range(7)
    ]
    (folder / "validation.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    suite = Suite(name="one", tasks=[t for t in load_suite("paper1").tasks if t.task == "boolq"])
    results = evaluate(
        "x", suite, "hf", tmp_path / "out", tmp_path / "data", opened=backend, progress=False
    )
    task = results["tasks"]["boolq"]
    assert (task["n"], task["version"], task["chance"]) == (7, 2.0, 0.5)
    samples = load_samples(tmp_path / "out", task)
    assert samples[3]["prompts"][0][0].startswith("3 was counted.\nQuestion: is 3 even?")
    ((leaf,),) = (line.leaves for line in lines_of(suite))
    assert logging.getLogger("lm_eval").level == logging.ERROR  # of a task it warns line by line
    assert not leaf.files and "custom_dataset" not in leaf.config, "local rows are that line's"


def test_a_naive_average_counts_every_task_once():
    def result(task, leaves, rows):
        raw = {
            "results": {
                name: {"acc,none": acc, "acc_stderr,none": error}
                for name, (acc, error, _) in rows.items()
            },
            "groups": {"mmlu": {"acc,none": 0.9}},
            "versions": {},
            "n-samples": {name: {"effective": n} for name, (_, _, n) in rows.items()},
        }
        return task_result(task, leaves, raw)

    entry = next(t for t in load_suite("paper1_qwen3").tasks if t.label == "mmlu_naive_average")
    rows = {"law": (0.25, 0.03, 1534), "logic": (0.5, 0.04, 126), "virology": (0.6, None, 166)}
    leaves = [Leaf(name, {}) for name in rows]
    found = result(entry, leaves, rows)
    assert found["value"] == pytest.approx(0.45) and found["stderr"] is None
    assert found["n"] == 1826 and list(found["metrics"]) == ["mean_acc,none"]
    del rows["virology"]
    assert result(entry, leaves[:2], rows)["stderr"] == pytest.approx(0.025)


@pytest.mark.slow
def test_human_eval_is_generated_then_scored(backend, data_folder, tmp_path):
    try:
        Sandbox()
    except DependencyError as error:
        pytest.skip(str(error))
    suite = load_suite("humaneval")
    suite.tasks[0].max_tokens = 8
    results = evaluate(
        "x", suite, "hf", tmp_path, data_folder, limit=3, opened=backend, progress=False
    )
    task = results["tasks"]["humaneval"]
    assert (task["metric"], task["value"], task["n"]) == ("pass@1", 0.0, 3)
    rows = load_samples(tmp_path, task)
    assert [row["filter"] for row in rows] == ["sandbox"] * 3
    assert all(len(row["extracted"][0]) == 1 and not row["metrics"]["pass@1"] for row in rows)


def test_programs_are_built_from_continuations_and_blocks():
    doc = {"prompt": "import math\n\ndef f(x):\n    '''Doc.'''\n", "test": "", "entry_point": "f"}
    continued = human_eval_program(doc, "    return math.pi\n")
    assert continued.code.endswith("'''Doc.'''\n    return math.pi\n")
    block = human_eval_program(doc, "Sure:\n```python\ndef f(x):\n    return math.e\n```\nDone.")
    namespace: dict = {}
    exec(block.code, namespace)
    assert round(namespace["f"](0), 3) == 2.718
    mbpp = {"test_list": ["assert g(1) == 2"], "test_setup_code": "", "test_imports": []}
    assert mbpp_program(mbpp, "def g(x): return x + 1\n[DONE] more").code.strip().endswith("x + 1")


def test_suite_files_are_checked(tmp_path):
    path = tmp_path / "s.yaml"
    for text, message in (
        ("name: [", "not YAML"),
        ("name: x\ntasks: []", "tasks: "),
        ("name: x\ntasks: [{task: a, metric: m}, {task: a, metric: m}]", "'a' occurs twice"),
        ("name: x\nlimit: 3\ntasks: [{task: a, metric: m}]", "limit: unknown key"),
        ("name: x\ntasks: [{task: a}]", r"tasks\.0\.metric: required, but missing"),
        ("name: x\ntasks: [{task: a, metric: m, shot: 3}]", "unknown key; did you mean"),
        (
            "name: x\ntasks: [{task: a, metric: m, shots: few}]",
            "shots: must be a valid integer",
        ),
        ("- 3", r"s\.yaml: must be a valid dictionary, not \[3\]"),
        (
            "name: x\ntasks: [{task: ../a, metric: m}]",
            r"s\.yaml: tasks\.0: task '\.\./a' cannot name",
        ),
    ):
        path.write_text(text)
        with pytest.raises(EvaluationError, match=message):
            load_suite(path)
    with pytest.raises(EvaluationError, match=r"nowhere\.yaml does not exist"):
        load_suite(tmp_path / "nowhere.yaml")


@pytest.mark.slow
def test_a_metric_that_a_group_does_not_report(data):
    tasks = [{"task": "mmlu", "metric": "acc_norm"}, {"task": "glue", "metric": "acc"}]
    tasks.append({"task": "glue", "label": "mean", "metric": "mean_acc", "aggregate": "mean_acc"})
    suite = Suite(name="s", tasks=tasks)
    for line in lines_of(suite, data):
        write_missing(line)
    mmlu, glue, mean = check_suite(suite, data)
    assert not mmlu.runnable and "it reports acc with filter none" in mmlu.problem
    assert not glue.runnable and "it is a group without a score; list its tasks" in glue.problem
    assert not mean.runnable and "reports no metric 'mean_acc'" in mean.problem  # CoLA's is mcc


# -- every task of every suite gives 1 to right answers and 0 to wrong ones, from rows to score ---


ITEMS = 3
ASKED = {"chat": False, "enable_thinking": None, "max_tokens": None}


def every_task() -> list[SuiteTask]:
    """The lines of all suites, each once."""
    entries: dict[str, SuiteTask] = {}
    for name in suite_names():
        for task in load_suite(name).tasks:
            if task.template is None:
                # How it is asked and where it is cut does not change how a reply is scored.
                task = task.model_copy(update=ASKED)
                assert entries.setdefault(task.label, task) == task, task.label
    return list(entries.values())


def write_missing(line):
    """Write the files that a line needs, from made rows."""
    for leaf in line.leaves:
        for file in leaf.missing:
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = made_rows(leaf.config["dataset_path"], leaf.config.get("dataset_name"))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def scores(task, oracle, entry) -> list[float]:
    """The headline metric of every item when ``oracle`` answers."""
    items = defaultdict(list)
    for instance in task.instances:
        items[instance.doc_id].append(instance)
        instance.resps, instance.filtered_resps = [], {}
    for instance in task.instances:
        (reply,) = getattr(oracle, instance.request_type)([instance])
        instance.resps.append(reply)
    task.apply_filters()
    found = []
    for instances in items.values():
        doc = instances[0].doc
        replies = [instance.filtered_resps[entry.filter] for instance in instances]
        found.append(task.process_results(doc, replies)[entry.metric])
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.slow
def test_right_answers_score_one_and_wrong_ones_nothing(data, monkeypatch):
    import lm_eval.utils

    # lm-eval compiles a prompt's template anew for every item: four fifths of the time here.
    templates = lm_eval.utils.env
    monkeypatch.setattr(templates, "from_string", functools.cache(templates.from_string))
    oracles = Oracle(True), Oracle(False)
    seen: set[str] = set()
    sandbox = Sandbox(allow_unsafe_local=True)
    entries = every_task()
    for entry in entries:
        entry.files = {split: f.removesuffix(".gz") for split, f in entry.files.items()}
    suite = Suite(name="all", tasks=entries)
    for entry, line in zip(entries, lines_of(suite, data), strict=True):
        write_missing(line)
        (line,) = lines_of(suite.model_copy(update={"tasks": [entry]}), data)
        tasks = line.load()["tasks"]
        for leaf in line.leaves:
            if leaf.name in seen:
                continue
            seen.add(leaf.name)
            task = tasks[leaf.name]
            task.build_all_requests(limit=ITEMS, rank=0, world_size=1)
            if entry.aggregate:
                entry = entry.model_copy(update={"metric": task.config.metric_list[0]["metric"]})
            with scored_by(sandbox.run_all):
                right, wrong = (scores(task, oracle, entry) for oracle in oracles)
            assert len(right) == ITEMS, leaf.name
            if entry.metric == "mcc":
                assert all(gold == said for gold, said in right), leaf.name
                assert all(gold != said for gold, said in wrong), leaf.name
            else:
                assert right == pytest.approx([1] * ITEMS), leaf.name
                assert wrong == pytest.approx([0] * ITEMS), leaf.name
        line.rehearse()
    assert len(seen) == 205
