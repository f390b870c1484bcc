"""Every task of every suite gives 1 to right answers and 0 to wrong ones, from rows to score."""

from __future__ import annotations

import functools
import json
from collections import defaultdict

import pytest

from moe_finetune.evaluation.catalog import Catalog
from moe_finetune.evaluation.code import FORMS
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.evaluation.suites import Suite, SuiteTask, load_suite, suite_names
from tests.evaluation.made_rows import Oracle, made_rows

ITEMS = 3


def every_task() -> list[SuiteTask]:
    """The lines of all suites, each once, but for what is evaluated elsewhere."""
    entries: dict[str, SuiteTask] = {}
    for name in suite_names():
        for task in load_suite(name).tasks:
            if task.external is None and task.template is None:
                # How it is asked and where it is cut does not change how a reply is scored.
                task = task.model_copy(update={"chat": False, "max_tokens": None})
                assert entries.setdefault(task.label, task) == task, task.label
    return list(entries.values())


def write_missing(folder, leaf):
    """Write the files that a leaf needs, from made rows."""
    for file in leaf.missing:
        if not file.exists():
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
        replies = [i.filtered_resps["none" if entry.code else entry.filter] for i in instances]
        values = task.process_results(doc, replies)
        if entry.code:
            found.append(FORMS[entry.code](doc, replies[0]))
        else:
            found.append(values[entry.metric])
    return found


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    entries = every_task()
    for entry in entries:
        entry.files = {split: f.removesuffix(".gz") for split, f in entry.files.items()}
    suite = Suite(name="all", tasks=entries)
    return Catalog(suite, tmp_path_factory.mktemp("data"))


def load(catalog, entry, leaves):
    for leaf in leaves:
        write_missing(catalog.data_dir, leaf)
    leaves = catalog.leaves(entry)
    tasks = catalog.load(entry, leaves)["tasks"]
    for leaf in leaves:
        tasks[leaf.name].build_all_requests(limit=ITEMS, rank=0, world_size=1)
        yield leaf, tasks[leaf.name]


@pytest.mark.slow
def test_right_answers_score_one_and_wrong_ones_nothing(catalog, monkeypatch):
    import lm_eval.utils

    # lm-eval compiles a prompt's template anew for every item: four fifths of the time here.
    templates = lm_eval.utils.env
    monkeypatch.setattr(templates, "from_string", functools.cache(templates.from_string))
    oracles = Oracle(True), Oracle(False)
    seen: set[str] = set()
    programs = []
    for entry in catalog.suite.tasks:
        leaves = [leaf for leaf in catalog.leaves(entry) if leaf.name not in seen]
        seen |= {leaf.name for leaf in leaves}
        wanted = {leaf.name for leaf in leaves}
        for leaf, task in load(catalog, entry, leaves):
            if leaf.name not in wanted:
                continue
            if entry.aggregate:
                entry = entry.model_copy(update={"metric": task.config.metric_list[0]["metric"]})
            right, wrong = (scores(task, oracle, entry) for oracle in oracles)
            assert len(right) == ITEMS, leaf.name
            if entry.code:
                programs += zip(right, wrong, strict=True)
            elif entry.metric == "mcc":
                assert all(gold == said for gold, said in right), leaf.name
                assert all(gold != said for gold, said in wrong), leaf.name
            else:
                assert right == pytest.approx([1] * ITEMS), leaf.name
                assert wrong == pytest.approx([0] * ITEMS), leaf.name
    assert len(seen) == 205 and len(programs) == 2 * ITEMS
    with Sandbox(allow_unsafe_local=True) as sandbox:
        for right, wrong in programs:
            assert sandbox.run(right).passed and not sandbox.run(wrong).passed
