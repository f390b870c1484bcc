"""Everything that others write, at random: an error of ours or none, never another, never long.

Seeds are fixed and a run takes about half a minute; ``MOE_FINETUNE_FUZZ=1000`` tries a thousand
times as many, with new seeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_finetune.checkpoint import merge_adapter, open_checkpoint
from moe_finetune.checkpoint.gate import check_adapter
from moe_finetune.checkpoint.permute import read_permutation
from moe_finetune.cli import main
from moe_finetune.data.rows import Former
from moe_finetune.data.sources import read_rows
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.evaluation.judge import parse_verdict
from moe_finetune.evaluation.results import load_results
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.rows import read_rows as read_task_rows
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.placement.plan import PlacementPlan
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.report.runs import read_run
from tests import tiny
from tests.checkpoint import helpers
from tests.evaluation.local import write_suite
from tests.faults.harness import write_inputs

pytestmark = pytest.mark.faults

TIMES = int(os.environ.get("MOE_FINETUNE_FUZZ", "1"))
SECONDS = 10.0  # none may take longer


def fuzz(examples: int):
    """Settings of one test: as many examples, times what was asked for."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


# Numbers, texts and names that have hurt programs before, among random ones.
ODD = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, 10**40, 1e308, -0.0, 5e-324, float("nan"), float("inf"), "", " ",
     "\0", "../x", "/etc/passwd", "kernels-community/x", "auto", "true", "NaN", "1e999", "\ud800",
     "\u202e", "a" * 3000, "{{ 7*7 }}", "${HOME}", "<script>", None, True, False, [], {}, [[]],
     "(a+)+$", "float16", "silu", "all"]
)  # fmt: skip
SCALARS = ODD | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
# Ways to spoil text: cut, doubled keys, deep nesting, bytes that are not UTF-8.
SPOILED = st.sampled_from([b"", b"[" * 3000, b"\xff\xfe", b"{}", b"null", b"[]", b'{"a":1,"a":2}'])


def changed(good: dict, depth: int = 3) -> st.SearchStrategy[dict]:
    """``good`` with one to three values at any depth replaced, removed or added."""
    paths = list(_paths(good, (), depth))

    def change(drawn) -> dict:
        held = json.loads(json.dumps(good))
        for path, action, value, name in drawn:
            at = held
            with contextlib.suppress(KeyError, IndexError, TypeError):
                for part in path[:-1]:
                    at = at[part]
                if action == "remove":
                    del at[path[-1]]
                elif action == "add" and isinstance(at, dict):
                    at[name] = value
                else:
                    at[path[-1]] = value
        return held

    actions = st.sampled_from(["replace", "replace", "remove", "add"])
    one = st.tuples(st.sampled_from(paths), actions, VALUES, st.text(max_size=8))
    return st.lists(one, min_size=1, max_size=3).map(change)


def _paths(value, path, depth):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if depth > 1 and isinstance(inner, dict | list):
            yield from _paths(inner, (*path, key), depth - 1)


def write(file: Path, value) -> None:
    """JSON as programs write it, NaN, lone surrogates and all; bytes as they are."""
    file.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())


@contextlib.contextmanager
def only_ours():
    """Errors of the toolkit are right, any other is not; and none may take long."""
    started = time.perf_counter()
    with contextlib.suppress(MoeFinetuneError):
        yield
    assert time.perf_counter() - started < SECONDS


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_inputs("qwen3_moe", folder)
    (folder / "qwen3_moe").symlink_to(folder / "base")
    options = {"target_modules": ["q_proj", "k_proj"], "target_parameters": list(helpers.EXPERTS)}
    helpers.adapter(folder / "qwen3_moe", folder / "adapter", **options)
    write_suite(folder / "suite")
    return folder


def over(folder: Path, good: Path) -> Path:
    """``folder`` as links to all files of ``good``, to lay a changed one over."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def lay(folder: Path, name: str, value) -> None:
    (folder / name).unlink(missing_ok=True)
    write(folder / name, value)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_configs(tiny_checkpoint, tmp_path, family):
    base = tiny_checkpoint(family)
    config = json.loads((base / "config.json").read_text())

    @fuzz(60)
    @given(st.one_of(changed(config), changed(config), SPOILED))
    def check(value):
        folder = over(tmp_path / "c", base)
        lay(folder, "config.json", value)
        with only_ours():
            open_checkpoint(folder)

    check()


def test_indexes(tmp_path):
    base = tmp_path / "base"
    tiny.model("olmoe").save_pretrained(base, max_shard_size="900KB")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    small = {"metadata": index["metadata"], "weight_map": dict(list(index["weight_map"].items()))}

    @fuzz(40)
    @given(st.one_of(changed(small), SPOILED))
    def check(value):
        folder = over(tmp_path / "c", base)
        lay(folder, "model.safetensors.index.json", value)
        with only_ours():
            open_checkpoint(folder)

    check()


def test_headers(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("mixtral")
    raw = (base / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    names = dict(list(entries.items())[:9])

    @fuzz(40)
    @given(st.one_of(changed(names), SPOILED), st.sampled_from([0, 0, 0, 1, 2**40, -9]))
    def check(value, wrong):
        held = {**entries, **value} if isinstance(value, dict) else value
        text = held if isinstance(held, bytes) else json.dumps(held).encode()
        folder = over(tmp_path / "c", base)
        start = struct.pack("<Q", max(0, len(text) + wrong))
        lay(folder, "model.safetensors", start + text + raw[8 + length :])
        with only_ours():
            open_checkpoint(folder)

    check()


@pytest.mark.parametrize("name", ["adapter_config.json", "moe_finetune.json"])
def test_adapters(good, tmp_path, name):
    base = open_checkpoint(good / "base")
    file = good / "adapter" / name
    held = {"experts": {"0": [1, 2]}, "experts_dropout": 0.1, "base_sha256": "x"}
    if file.exists():
        held = json.loads(file.read_text())

    @fuzz(60 if file.exists() else 30)
    @given(st.one_of(changed(held), changed(held), SPOILED))
    def check(value):
        folder = over(tmp_path / "a", good / "adapter")
        lay(folder, name, value)
        with only_ours():
            check_adapter(folder, base)
            merge_adapter(base.folder, folder, tmp_path / "m", dry_run=True)

    check()


def test_recipes(good, tmp_path):
    recipe = json.loads((good / "recipe.yaml").read_text())
    recipe["method"] = {"preset": "erc", "terms": {"variance": {"weight": 0.1}}}

    @fuzz(150)
    @given(st.one_of(changed(recipe), changed(recipe), SPOILED, st.text().map(str.encode)))
    def check(value):
        write(tmp_path / "r.yaml", value)
        with only_ours():
            load_recipe([tmp_path / "r.yaml"])

    check()


@fuzz(100)
@given(st.text(alphabet="ab.0=:[]{}&*!?|>-'\"\\ \n#,1e", max_size=40))
def test_overrides(text):
    with only_ours():
        load_recipe([], [f"method{text}"])


def test_suites(good, tmp_path):
    import yaml

    suite = yaml.safe_load((good / "suite" / "local.yaml").read_text())

    @fuzz(100)
    @given(st.one_of(changed(suite, 5), changed(suite, 5), SPOILED))
    def check(value):
        write(tmp_path / "s.yaml", value)
        with only_ours():
            load_suite(tmp_path / "s.yaml")

    check()


ROWS = {
    "prompt": "p",
    "completion": "c",
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_rows(tmp_path, suffix):
    @fuzz(70)
    @given(st.one_of(changed(ROWS, 4), VALUES, SPOILED, st.text(max_size=30).map(_utf8)))
    def check(value):
        file = tmp_path / f"rows{suffix}"
        write(file, [value] if suffix == ".json" and not isinstance(value, bytes) else value)
        with only_ours():
            former = Former()
            for place, row in read_rows(str(file)):
                former(place, row)
        with only_ours():
            read_task_rows(file)

    check()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


RESULTS = {
    "schema": 1,
    "complete": True,
    "suite": {"name": "s", "sha256": "0"},
    "checkpoint": {"path": "p", "sha256": "1"},
    "tasks": {"t": {"task": "t", "value": 0.5, "stderr": 0.1, "n": 4, "metrics": {}}},
}


def test_results_and_summaries(tmp_path):
    (tmp_path / "eval").mkdir()

    @fuzz(80)
    @given(st.one_of(changed(RESULTS, 4), SPOILED), st.one_of(changed({"merge": {"seconds": 1.5}})))
    def check(results, summary):
        write(tmp_path / "eval" / "results.json", results)
        write(tmp_path / "summary.json", summary)
        with only_ours():
            load_results(tmp_path / "eval")
        with only_ours():
            read_run(tmp_path, "r")

    check()


SELECTION = {"model_type": "olmoe", "num_experts": 5, "experts": {"1": [0, 3], "2": [4]}}
PLAN = {
    "format": "moe-finetune placement plan",
    "model_type": "olmoe",
    "num_experts": 4,
    "num_ranks": 2,
    "layers": {"0": {"ranks": [0, 1, 0, 1], "permutation": [0, 2, 1, 3]}},
}


@pytest.mark.parametrize(
    ("document", "read"),
    [
        (SELECTION, ExpertSelection.read),
        (PLAN, PlacementPlan.read),
        ({"1": [1, 0, 2], "2": [0, 1, 2]}, read_permutation),
    ],
)
def test_selections_plans_and_permutations(tmp_path, document, read):
    @fuzz(80)
    @given(st.one_of(changed(document, 4), SPOILED))
    def check(value):
        write(tmp_path / "d.json", value)
        with only_ours():
            read(tmp_path / "d.json")

    check()


@fuzz(150)
@given(
    st.one_of(
        st.text(max_size=60),
        VALUES.map(lambda value: json.dumps(value)),
        changed({"correct": True, "reason": "r"}).map(json.dumps),
    )
)
def test_judges_replies(text):
    with only_ours():
        parse_verdict(text)


@pytest.mark.parametrize("argument", ["x\udcff", "\ud800.yaml", "a\0b", "\n", "-", "--", "é" * 300])
def test_names_of_files_that_are_no_text(argument, capsys):
    for verb in (["inspect"], ["report"], ["train"], ["merge"], ["eval", "--suite", "demo"]):
        code = main([*verb, argument])
        said = capsys.readouterr()[1]
        assert code == 2 and "Traceback" not in said, (verb, said)
