from __future__ import annotations

import json

import pytest

from moe_finetune.errors import DataError, DependencyError, EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.catalog import Catalog
from moe_finetune.evaluation.code import human_eval_program, mbpp_program
from moe_finetune.evaluation.collect import task_result
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.leaf import Leaf
from moe_finetune.evaluation.offline import check_suite, render_checks
from moe_finetune.evaluation.results import load_samples
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.evaluation.suites import Suite, load_suite, suite_names
from tests.evaluation.local import write_suite

PAPERS = {"paper0": 11, "paper1": 15, "paper1_qwen3": 10, "paper2": 17}


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
    catalog = Catalog(Suite(name="all", tasks=list(every.values())))
    leaves = {
        label: catalog.leaves(task)
        for label, task in every.items()
        if not task.external and not task.template
    }
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
    (leaf,) = Catalog(suite).leaves(suite.tasks[0])
    assert not leaf.files and "custom_dataset" not in leaf.config, "local rows are that catalog's"


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
        Sandbox().close()
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
    assert all(len(row["verdicts"]) == 1 for row in rows)


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
            "shots: must be a whole number",
        ),
        ("- 3", r"s\.yaml: must be a mapping, not \[3\]"),
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
