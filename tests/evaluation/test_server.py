"""The backend `server`: a stdlib server that speaks the protocol, and a real vLLM server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.backends import open_backend, server_models
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.parity import parity
from moe_finetune.evaluation.results import load_results
from moe_finetune.evaluation.vllm_install import vllm_status
from tests import tiny
from tests.evaluation.local import write_suite


class Handler(BaseHTTPRequestHandler):
    """/v1/models and /v1/completions over a transformers model, as vLLM answers."""

    def do_GET(self):
        models = [{"id": "tiny", "root": str(self.server.folder)}]
        self._send(200, {"object": "list", "data": models} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.left -= 1
        if self.server.left < 0:
            return self._send(503, {"error": "gone"})
        with self.server.lock, torch.no_grad():
            prompts = body["prompt"]
            choices = [self._choice(body, ids, i) for i, ids in enumerate(prompts)]
        self._send(200, {"choices": choices})

    def _choice(self, body, ids, index):
        model, tokenizer = self.server.model, self.server.tokenizer
        if body.get("logprobs"):
            table = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            own = [table[i - 1, t].item() for i, t in enumerate(ids) if i]
            best = [{f"t{table[i - 1].argmax()}": table[i - 1].max().item()}
                    | {f"t{t}": own[i - 1]} for i, t in enumerate(ids) if i]  # fmt: skip
            return {
                "index": index,
                "text": "",
                "logprobs": {
                    "token_logprobs": [None, *own, 0.0],
                    "tokens": [f"t{t}" for t in ids] + ["t0"],
                    "top_logprobs": [None, *best, {"t0": 0.0}],
                },
            }
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=3
        )
        text = tokenizer.decode(out[0, len(ids) :])
        for stop in body.get("stop") or []:
            text = text.split(stop)[0]
        return {"index": index, "text": text}

    def _send(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(checkpoint):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.folder, running.left, running.lock = checkpoint, 10**9, threading.Lock()
        running.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        running.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        running.url = f"http://127.0.0.1:{running.server_address[1]}/v1"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_server_gives_the_answers_of_the_checkpoint(server, checkpoint, tmp_path):
    suite = write_suite(tmp_path / "data", items=12)
    found = parity(
        checkpoint, ("hf", "server"), suite, tmp_path / "out", 12,
        opened={"server": open_backend(checkpoint, "server", base_url=server.url)},
    )  # fmt: skip
    assert [p.holds for p in found] == [True, True], found


def test_wrong_model_and_wrong_checkpoint(server, checkpoint, tmp_path):
    assert server_models(server.url) == {"tiny": str(checkpoint)}
    with pytest.raises(EvaluationError, match="has no model 'tinny'; did you mean 'tiny'"):
        open_backend(checkpoint, "server", base_url=server.url, model="tinny")
    other = tiny.save("qwen3_moe", tmp_path / "other", seed=3)
    with pytest.raises(EvaluationError, match="is another checkpoint"):
        open_backend(other, "server", base_url=server.url)
    with pytest.raises(EvaluationError, match="does not answer like"):
        server_models(server.url + "/nothing")
    with pytest.raises(EvaluationError, match="needs base_url"):
        open_backend(checkpoint, "server")


@pytest.mark.faults
@pytest.mark.slow
def test_a_server_that_dies_keeps_what_it_answered(server, checkpoint, tmp_path):
    suite = write_suite(tmp_path / "data", items=6)
    server.left = 6 + 5  # all of the first task, some of the second
    arguments = {"output": tmp_path / "out", "base_url": server.url, "progress": False}
    with pytest.raises(EvaluationError, match=r"stopped answering .*run the same command again"):
        evaluate(checkpoint, suite, "server", **arguments)
    partial = load_results(tmp_path / "out")
    assert not partial["complete"] and list(partial["tasks"]) == ["sums"]
    server.left = 10**9
    whole = evaluate(checkpoint, suite, "server", **arguments)
    assert (
        whole["complete"] and whole["tasks"]["sums"]["usage"] == (partial["tasks"]["sums"]["usage"])
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_vllm_server(checkpoint, tmp_path):
    status = vllm_status()
    if not status.usable:
        pytest.skip(str(status))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "vllm"), "serve", str(checkpoint), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32",
        "--enforce-eager", "--max-num-seqs", "16",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}/v1"
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                assert list(server_models(url)) == ["tiny"]
                break
            except EvaluationError:
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(1)
        suite = write_suite(tmp_path / "data", items=30)
        with open_backend(checkpoint, "server", base_url=url) as opened:
            found = parity(checkpoint, ("hf", "server"), suite, tmp_path / "out", 30,
                           opened={"server": opened})  # fmt: skip
        assert [p.holds for p in found] == [True, True], found
    finally:
        process.terminate()
        process.wait(30)
