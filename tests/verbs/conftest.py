"""Inputs in good order to damage, and what a refusal is."""

import json
import shutil

import numpy as np
import pytest

from moe_finetune.checkpoint.adapters.files import BASE_KEY, write_metadata
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.weight_files import fingerprint
from moe_finetune.routing.trace_writer import TraceWriter
from tests.checkpoint import helpers
from tests.evaluation.local import write_suite
from tests.routing.traces import topical
from tests.training.resume.harness import contents, write_inputs


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """A checkpoint, an adapter that knows its base, a recipe, a suite and a trace."""
    folder = tmp_path_factory.mktemp("good")
    write_inputs("qwen3_moe", folder)
    (folder / "qwen3_moe").symlink_to(folder / "base")  # the helper reads the family off the path
    options = {"target_modules": ["q_proj", "k_proj"], "target_parameters": list(helpers.EXPERTS)}
    helpers.adapter(folder / "qwen3_moe", folder / "adapter", **options)
    base = open_checkpoint(folder / "base")
    write_metadata(folder / "adapter", **{BASE_KEY: fingerprint(base.tensors.values())})
    write_suite(folder / "suite")
    index_TLK, seq_T = topical(layers=3, tokens=300)
    with TraceWriter(
        folder / "trace", model_type="qwen3_moe", checkpoint="base", layers=(0, 1, 2),
        num_experts=12, top_k=3, hidden_size=192,
    ) as writer:  # fmt: skip
        weights_TLK = np.full(index_TLK.shape, 1 / 3)
        writer.append(index_TLK=index_TLK, weights_TLK=weights_TLK, seq_T=seq_T)
    return folder


@pytest.fixture
def here(good, tmp_path, monkeypatch):
    """A copy of the inputs, and the current folder."""
    for path in good.iterdir():
        if not path.is_symlink():
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, tmp_path / path.name)
    recipe = json.loads((tmp_path / "recipe.yaml").read_text())
    recipe["model"]["path"], recipe["data"]["train"] = "base", "train.jsonl"
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(here, capsys):
    """``refused(argv, *words)``: exit code 2, one message with the words, no file changed."""

    def check(argv, *words: str) -> None:
        from moe_finetune.cli import main

        before = contents(here)
        capsys.readouterr()
        code = main(argv)
        printed = capsys.readouterr()[1]
        assert code == 2 and "Traceback" not in printed, printed
        message = printed.rpartition("error: ")[2]
        for word in words:
            assert word in message, message
        assert contents(here) == before

    return check


@pytest.fixture(autouse=True, scope="module")
def _warm(warm):
    """Rehearsals of runs are forked."""
