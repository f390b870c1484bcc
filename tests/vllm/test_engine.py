"""Everything that needs a vLLM engine, over one engine."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from moe_finetune.errors import DependencyError, EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.vllm.engine import engine_arguments, engines_environment, open_vllm, shutdown
from moe_finetune.vllm.install import vllm_status
from tests.conftest import ROOT
from tests.evaluation.local import write_suite
from tests.support.parity import parity

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def vllm_engine(warm_vllm, checkpoint):
    try:
        backend = open_backend(checkpoint, "vllm", vllm={"max_num_seqs": 64})
    except DependencyError as error:
        pytest.skip(str(error))
    with backend:
        yield backend


def test_vllm_and_transformers_give_the_same_answers(vllm_engine, checkpoint, tmp_path):
    suite = write_suite(tmp_path / "data", items=60)
    found = parity(checkpoint, ("vllm", "hf"), suite, tmp_path / "out", 60,
                   opened={"vllm": vllm_engine})  # fmt: skip
    by_task = {p.task: p for p in found}
    assert set(by_task) == {"sums", "colours"}
    for result in found:
        assert result.holds and result.n == 60, result
    assert by_task["sums"].largest_difference is None
    assert by_task["colours"].largest_difference < 1e-3


def test_parity_sees_another_model(vllm_engine, checkpoint, tmp_path):
    from tests.support import tiny

    suite = write_suite(tmp_path / "data", items=20)
    with open_backend(tiny.save("qwen3_moe", tmp_path / "other", seed=9), "hf") as other:
        found = parity(checkpoint, ("vllm", "hf"), suite, tmp_path / "out", 20,
                       opened={"vllm": vllm_engine, "hf": other})  # fmt: skip
    assert not any(result.holds for result in found)
    assert all(result.equal_prompts == 20 for result in found)


def test_one_engine_serves_several_suites(vllm_engine, checkpoint, tmp_path):
    for items, name in ((11, "a"), (13, "b")):
        suite = write_suite(tmp_path / name, items)
        results = evaluate("unused", suite, "vllm", tmp_path / name / "out", opened=vllm_engine)
        assert results["complete"] and results["backend"] == "vllm"
        assert results["tasks"]["sums"]["n"] == items
        assert results["settings"]["engine"]["dtype"] == "float32"


def test_a_long_context_is_as_long_as_the_cache(warm_vllm, checkpoint, tmp_path):
    """4M tokens need more than the cache's 1 GiB; by default vLLM would not start."""
    if not (status := vllm_status(try_import=False)).usable or status.build != "cpu":
        pytest.skip(str(status))
    long = shutil.copytree(checkpoint, tmp_path / "long")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4_000_000}))
    suite = write_suite(tmp_path / "data", items=5)
    with open_backend(long, "vllm", vllm={"max_num_seqs": 4}) as opened:
        assert 1_000 < opened.max_length < 4_000_000
        assert evaluate(long, suite, "vllm", tmp_path / "out", opened=opened)["complete"]


def test_engine_arguments_that_cannot_work_are_refused():
    with pytest.raises(EvaluationError, match="trust_remote_code"):
        engine_arguments({"trust_remote_code": True})
    with pytest.raises(EvaluationError, match="serve the checkpoint"):
        engine_arguments({"data_parallel_size": 2, "enable_expert_parallel": True})
    assert engine_arguments({"tensor_parallel_size": 4})["tensor_parallel_size"] == 4


def _two_engines(checkpoint, answer):
    """Write whether each of two engines is gone once it is closed."""
    gone = []
    for _ in range(2):
        lm, _ = open_vllm(checkpoint, {"max_num_seqs": 4})
        engine = weakref.ref(lm.model.llm_engine)
        shutdown(lm)
        del lm
        gone.append(engine() is None)
    Path(answer).write_text(json.dumps(gone))


def test_engines_in_one_process_leave_nothing(checkpoint, tmp_path):
    status = vllm_status(try_import=False)
    if not status.usable:
        pytest.skip(str(status))
    code = "import sys; from tests.vllm.test_engine import _two_engines as two; two(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(checkpoint), str(tmp_path / "gone")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **engines_environment()}, check=True)
    assert json.loads((tmp_path / "gone").read_text()) == [True, True]
