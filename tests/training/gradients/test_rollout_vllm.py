"""GRPO with the experts of vLLM's rollouts, against real vLLM in both of TRL's modes.

Its CPU build captures no experts; :mod:`tests.support.vllm_capture` stands in for that part alone.
"""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.training.stages.grpo_trainer import PinsExperts, Scoring
from moe_finetune.training.stages.vllm_rollouts import (
    ask_server,
    check_rolled_out,
    check_server,
    client_returns_experts,
    place,
    rolled_out,
)
from moe_finetune.vllm.install import is_cpu_build
from tests.support.ranks import ROOT, run_ranks
from tests.support.vllm_server import free_port, needs_vllm

RANKS = 2
EQUAL = 1e-5
FACTS = ModelFacts(moe_layers=(1, 3), num_experts=9, top_k=2, vocab_size=50)


def arrays_of(*lengths):
    """Experts of rows of some tokens, as vLLM returns them: 4 decoder layers, two of them dense."""
    g = np.random.default_rng(0)
    rows = [np.zeros((length - 1, 4, 2), np.uint8) for length in lengths]
    for row in rows:
        for token in row:
            token[[1, 3]] = [g.choice(9, 2, replace=False) for _ in range(2)]
    return rows


def test_rows_are_placed_from_their_first_token_on():
    arrays = arrays_of(4, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0]])
    choice = place(check_rolled_out(arrays, [4, 6], FACTS), mask, FACTS)
    assert choice.index_BSLK.shape == (2, 8, 2, 2) and choice.index_BSLK.dtype == torch.uint8
    ran = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0]]).bool()
    assert torch.equal(~choice.missing_BS, ran)
    for row, (array, start) in enumerate(zip(arrays, (2, 1), strict=True)):
        found = choice.index_BSLK[row, start : start + len(array)].numpy()
        np.testing.assert_array_equal(found, array[:, [1, 3]])
    # Truncated completions are masked: their tokens are missing, the prompt's are not.
    mask[1, 3:] = 0
    truncated = place(check_rolled_out(arrays, [4, 6], FACTS), mask, FACTS)
    assert torch.equal(~truncated.missing_BS[1], torch.tensor([0, 1, 1, 0, 0, 0, 0, 0]).bool())


def test_many_experts_take_two_bytes():
    facts = ModelFacts(moe_layers=(0,), num_experts=300, top_k=2, vocab_size=50)
    array = np.array([[[299, 3]], [[7, 256]]], np.uint16)
    choice = place(check_rolled_out([array], [3], facts), torch.ones(1, 3), facts)
    assert choice.index_BSLK.dtype == torch.int16
    assert choice.index_BSLK[0, :2, 0].tolist() == [[299, 3], [7, 256]]


@pytest.mark.parametrize(
    ("change", "lengths"),
    [
        (lambda rows: [None, rows[1]], [4, 6]),
        (lambda rows: [rows[0][1:], rows[1]], [4, 6]),
        (lambda rows: rows[:1], [4, 6]),
        (lambda rows: [row[:, :3] for row in rows], [4, 6]),  # without the last layer
        (lambda rows: [row[..., :1] for row in rows], [4, 6]),
        (lambda rows: [np.roll(row, 1, axis=1) for row in rows], [4, 6]),  # dense layers there
        (lambda rows: [row * np.uint8(9) for row in rows], [4, 6]),  # of a larger model
        (lambda rows: rows, [6, 4]),
    ],
)
def test_what_does_not_belong_to_the_rows_is_refused(change, lengths):
    assert len(check_rolled_out(arrays_of(4, 6), [4, 6], FACTS)) == 2
    with pytest.raises(CaptureError, match="vLLM returned"):
        check_rolled_out(change(arrays_of(4, 6)), lengths, FACTS)


def test_a_rank_of_a_group_takes_its_own_rows(monkeypatch):
    llm = SimpleNamespace(routed_experts=list(range(6)))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: {"its": 1}[group])
    generation = SimpleNamespace(
        mode="colocate", tensor_parallel_size=2, tp_group="its", llm=llm, accelerator=None
    )
    assert rolled_out(generation, 3) == [3, 4, 5] and llm.routed_experts == []


def test_a_server_that_keeps_its_prefix_cache_ends_the_run():
    client = SimpleNamespace(_post=lambda url, **_: {"success": url.startswith("http://idle")})
    client_returns_experts(client)
    assert client._post("http://idle/reset_prefix_cache")["success"]
    with pytest.raises(CaptureError, match="could not reset its prefix cache"):
        client._post("http://busy/reset_prefix_cache")


class Sampler:
    tools = None

    def _generate_single_turn(self, prompt_ids, *args):
        return [[7] for _ in prompt_ids], None


@pytest.mark.parametrize("case", ["images", "tools", "rollout_func"])
def test_rollouts_without_experts_of_their_own_end_the_run(case):
    trainer: Any = type("Trainer", (PinsExperts, Sampler), {})()
    trainer.replay, trainer._scoring = "rollout", Scoring()
    trainer.tools = [len] if case == "tools" else None
    with pytest.raises(CaptureError, match=rf"router.replay: rollout: .*{case}"):
        if case == "rollout_func":  # it calls no engine of TRL's
            trainer._earlier_choice(torch.ones(1, 2))
        trainer._generate_single_turn([[5]], ["a picture"] if case == "images" else None)


def info(**changes):
    config = {
        "aux_output_config": {"enable_return_routed_experts": True},
        "parallel_config": {"pipeline_parallel_size": 1},
        "cache_config": {"enable_prefix_caching": True},
    }
    return config | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"aux_output_config": {}}, "without --enable-return-routed-experts"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "--pipeline-parallel-size 2"),
        ({"cache_config": {"enable_prefix_caching": False}}, "--no-enable-prefix-caching"),
    ],
)
def test_a_server_that_returns_no_experts_is_refused_by_what_it_lacks(changes, named):
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"vllm_config": info(**changes)}).encode())

        def log_message(self, *args):
            pass

    check_server(info(), "here")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address
        arguments = SimpleNamespace(
            vllm_server_base_url=None, vllm_server_host=host, vllm_server_port=port
        )
        with pytest.raises(RecipeError, match=rf"http://{host}:{port} cannot .*{named}"):
            ask_server(arguments)
        server.shutdown()
    ask_server(arguments)  # nothing answers: it may still start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rollouts")


@pytest.fixture(scope="module")
def engine(warm_vllm, folder):
    """Results of trainings whose engine is in their process."""
    if not is_cpu_build():
        pytest.skip("the stand-in is for vLLM's CPU build")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.gradients.rollout_worker", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads((folder / "engine.json").read_text())


def aligned(found, steps=2):
    """Used experts are the rollout's in each pass, and those that equal weights select."""
    first, *later = found["logs"]
    assert len(later) == steps - 1 and found["used"] and set(found["used"]) == {1.0}
    assert first["routing/changed_from_rollout"] == 0
    assert first["rollout/log_prob_difference"] < EQUAL and abs(first["rollout/kl"]) < EQUAL
    assert first["rollout/missing_experts"] == first["rollout/ratio_beyond_2"] == 0


@pytest.mark.vllm
@pytest.mark.slow
@needs_vllm
class TestEngine:
    @pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])  # whose first layer is dense
    def test_with_equal_weights_training_selects_what_the_rollout_did(self, engine, family):
        aligned(engine[family])
        _, second = engine[family]["logs"]  # at a learning rate of 2e-2
        assert second["routing/changed_from_rollout"] > 0.3
        assert second["rollout/ratio_beyond_2"] > 0

    @pytest.mark.parametrize("control", ["shifted", "swapped"])
    def test_other_rows_are_seen_although_they_are_used(self, engine, control):
        first, _ = engine[control]["logs"]
        assert set(engine[control]["used"]) == {1.0}
        assert first["rollout/log_prob_difference"] > 0.1
        assert first["routing/changed_from_rollout"] > 0.5

    @pytest.mark.parametrize(
        ("case", "named"),
        [
            ("a row missing", "expected (10 tokens"),
            ("nothing", "shape None"),
            ("dense layer first", "no experts for a token"),
            ("busy", "could not reset its prefix cache"),
        ],
    )
    def test_a_rollout_that_cannot_be_right_ends_the_run(self, engine, case, named):
        assert named in engine[case]["error"]

    def test_without_replay_and_with_the_old_policys_experts(self, engine):
        for name in ("off", "old_policy"):
            first, second = engine[name]["logs"]
            assert "routing/changed_from_rollout" not in first
            assert first["rollout/log_prob_difference"] < EQUAL
            assert second["rollout/log_prob_difference"] > 0.1
        first, second = engine["old_policy"]["logs"]
        assert first["routing/changed_from_old_policy"] == 0
        assert second["routing/changed_from_old_policy"] > 0.3
        assert set(engine["old_policy"]["used"]) == {1.0} and not engine["off"]["used"]

    def test_a_learned_bias_is_sent_with_the_weights(self, engine):
        """Only the bias moves; the engine selects with it from the second rollout on."""
        for log in engine["bias"]["logs"]:
            assert log["routing/changed_from_rollout"] == 0
        first, *later = engine["bias not sent"]["logs"]
        assert first["routing/changed_from_rollout"] == 0
        assert all(log["routing/changed_from_rollout"] > 0 for log in later)


@pytest.fixture(scope="module")
def server(warm_vllm, engine, folder):
    """The address of a real server of the first checkpoint."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = [
        *("serve", str(folder / "qwen"), "--port", str(port), "--enable-return-routed-experts"),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "64"),
        *("--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs"),
    ]
    development = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.vllm_capture", *arguments],
            stdout=log, stderr=log, cwd=ROOT,
            env={**os.environ, **development, "VLLM_CPU_KVCACHE_SPACE": "1"},
        )  # fmt: skip
    try:
        while process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
                break
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


@pytest.mark.vllm
@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("world", [1, RANKS])
def test_a_server_returns_each_ranks_rows(server, folder, world):
    run_ranks("tests.training.gradients.rollout_worker", world, folder, server)
    for rank in range(world):
        aligned(json.loads((folder / f"server-{world}-{rank}.json").read_text()))


@pytest.mark.gpu
@pytest.mark.vllm
def test_a_gpu_returns_what_training_selects(tmp_path):
    """vLLM's own capture, prefix cache and weight transfer, in float32: no stand-in."""
    subprocess.run(
        [sys.executable, "-m", "tests.training.gradients.rollout_worker", str(tmp_path), "gpu"],
        cwd=ROOT,
        check=True,
        timeout=900,
    )
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["used"]) == {1.0}
    for log in found["logs"]:  # each right after its weights were sent
        assert log["routing/changed_from_rollout"] < 0.02
        assert log["rollout/log_prob_difference"] < 1e-2
