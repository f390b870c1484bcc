"""Everything that others write, at random: one of our errors or none, and never any other.

Seeds are fixed; ``MOE_FINETUNE_FUZZ=1000`` tries a thousand times as many examples, with new seeds.
"""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.cli import main
from moe_finetune.data.row_forms import Former
from moe_finetune.data.sources import read_rows
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.evaluation.results import load_results
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.report.read_runs import read_run
from tests.checkpoint import helpers
from tests.training.resume.harness import write_inputs

pytestmark = pytest.mark.faults

TIMES = int(os.environ.get("MOE_FINETUNE_FUZZ", "1"))


def fuzz(examples: int):
    """Settings of one test: as many examples, times what the environment asks for."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


# Numbers, texts and names that have broken programs before, among random ones.
ODD = st.sampled_from(
    [0, -1, 2**63, 10**30, 1e308, -0.0, float("nan"), float("inf"), "", " ", "\0", "../x", "auto",
     "NaN", "1e999", "{{ 7*7 }}", "<script>", None, True, [], {}, [[]], "silu", "all"]
)  # fmt: skip
SCALARS = ODD | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
BROKEN = st.sampled_from([b"", b"[" * 3000, b"\xff\xfe", b"{}", b"null", b"[]", b'{"a":1,"a":2}'])


def changed(document: dict, depth: int = 3) -> st.SearchStrategy[dict]:
    """``document`` with one to three values at any depth replaced, removed or added."""
    paths = list(_paths(document, (), depth))

    def change(drawn) -> dict:
        result = json.loads(json.dumps(document))
        for path, action, value, name in drawn:
            parent = result
            with contextlib.suppress(KeyError, IndexError, TypeError):
                for part in path[:-1]:
                    parent = parent[part]
                if action == "remove":
                    del parent[path[-1]]
                elif action == "add" and isinstance(parent, dict):
                    parent[name] = value
                else:
                    parent[path[-1]] = value
        return result

    actions = st.sampled_from(["replace", "replace", "remove", "add"])
    one = st.tuples(st.sampled_from(paths), actions, VALUES, st.text(max_size=8))
    return st.lists(one, min_size=1, max_size=3).map(change)


def _paths(value, path, depth):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if depth > 1 and isinstance(inner, dict | list):
            yield from _paths(inner, (*path, key), depth - 1)


def to_bytes(value: Any) -> bytes:
    """JSON as programs write it, NaN included; bytes as they are."""
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def only_ours():
    """Errors of the toolkit are right, any other is not."""
    return contextlib.suppress(MoeFinetuneError)


def over(folder: Path, original: Path, name: str, content: bytes) -> Path:
    """``folder`` as links to all files of ``original``, but ``name`` with ``content``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in original.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_bytes(content)
    return folder


def read_former(file: Path) -> None:
    """Training rows, as they are read and formed."""
    former = Former()
    for place, row in read_rows(str(file)):
        former(place, row)


RECIPE = {
    "model": {"path": "base", "dtype": "float32"},
    "method": {"preset": "erc", "terms": {"variance": {"weight": 0.1}}},
    "lora": {"rank": 4, "alpha": 16.0, "dropout": 0.1},
    "data": {"train": "train.jsonl", "max_length": 48},
    "trainer": {"max_steps": 9, "learning_rate": 1e-2, "report_to": []},
    "export": {"merge": False},
}
ROWS = {
    "prompt": "p",
    "completion": "c",
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
}
SUITE = {
    "name": "local",
    "tasks": [{"task": "local_choice", "label": "choice", "shots": 0, "limit": 3}],
}
RESULTS = {
    "schema": 1,
    "complete": True,
    "suite": {"name": "s", "sha256": "0"},
    "checkpoint": {"path": "p", "sha256": "1"},
    "tasks": {"t": {"task": "t", "value": 0.5, "stderr": 0.1, "n": 4, "metrics": {}}},
}
SELECTION = {"model_type": "olmoe", "num_experts": 5, "experts": {"1": [0, 3], "2": [4]}}
DOCUMENTS: dict[str, tuple[dict, Callable[[Path], Any]]] = {
    "recipe.yaml": (RECIPE, lambda file: load_recipe([file])),
    "suite.yaml": (SUITE, load_suite),
    "rows.jsonl": (ROWS, read_former),
    "rows.csv": (ROWS, read_former),
    "results.json": (RESULTS, load_results),
    "summary.json": ({"merge": {"seconds": 1.5}}, lambda file: read_run(file.parent, "r")),
    "selection.json": (SELECTION, ExpertSelection.read),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(tmp_path, name):
    document, read = DOCUMENTS[name]

    @fuzz(70)
    @given(st.one_of(changed(document, 4), changed(document, 4), BROKEN, st.text().map(str.encode)))
    def check(value):
        (tmp_path / name).write_bytes(to_bytes(value))
        with only_ours():
            read(tmp_path / name)

    check()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_configs(tiny_checkpoint, tmp_path, family):
    base = tiny_checkpoint(family)
    config = json.loads((base / "config.json").read_text())

    @fuzz(40)
    @given(st.one_of(changed(config), changed(config), BROKEN))
    def check(value):
        with only_ours():
            open_checkpoint(over(tmp_path / "c", base, "config.json", to_bytes(value)))

    check()


def test_headers(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("mixtral")
    raw = (base / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    some = dict(list(entries.items())[:9])

    @fuzz(40)
    @given(st.one_of(changed(some), BROKEN), st.sampled_from([0, 0, 0, 1, 2**40, -9]))
    def check(value, wrong):
        header = to_bytes({**entries, **value} if isinstance(value, dict) else value)
        content = struct.pack("<Q", max(0, len(header) + wrong)) + header + raw[8 + length :]
        with only_ours():
            open_checkpoint(over(tmp_path / "c", base, "model.safetensors", content))

    check()


def test_adapter_configs(tmp_path):
    write_inputs("qwen3_moe", tmp_path)
    (tmp_path / "qwen3_moe").symlink_to(tmp_path / "base")
    options = {"target_modules": ["q_proj", "k_proj"], "target_parameters": list(helpers.EXPERTS)}
    helpers.adapter(tmp_path / "qwen3_moe", tmp_path / "adapter", **options)
    base = open_checkpoint(tmp_path / "base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())

    @fuzz(50)
    @given(st.one_of(changed(config), changed(config), BROKEN))
    def check(value):
        content = to_bytes(value)
        folder = over(tmp_path / "a", tmp_path / "adapter", "adapter_config.json", content)
        with only_ours():
            check_adapter(folder, base)
            merge_adapter(base.folder, folder, tmp_path / "m", dry_run=True)

    check()


@fuzz(100)
@given(st.text(alphabet="ab.0=:[]{}&*!?|>-'\"\\ \n#,1e", max_size=40))
def test_overrides(text):
    with only_ours():
        load_recipe([], [f"method{text}"])


@pytest.mark.parametrize("argument", ["x\udcff", "\ud800.yaml", "a\0b", "\n", "-", "--", "é" * 300])
def test_names_of_files_that_are_no_text(argument, capsys):
    for verb in (["inspect"], ["report"], ["train"], ["merge"], ["eval", "--suite", "demo"]):
        code = main([*verb, argument])
        printed = capsys.readouterr()[1]
        assert code == 2 and "Traceback" not in printed, (verb, printed)
