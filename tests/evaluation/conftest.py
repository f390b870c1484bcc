import os
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation import sandbox as sandbox_module
from moe_finetune.evaluation.sandbox import Limits, Sandbox
from moe_finetune.io.row_files import read_rows
from tests.evaluation import judge_server
from tests.evaluation.completions_server import Handler

QUICK = Limits(seconds=4)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("MOE_FINETUNE_DATA", beside))
    if not (folder / "gsm8k_test.jsonl").is_file():
        pytest.skip(f"no shared data at {folder}; set MOE_FINETUNE_DATA")
    return folder


@pytest.fixture(scope="module")
def sandbox():
    try:
        return Sandbox(QUICK)
    except DependencyError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_bubblewrap(monkeypatch):
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)


@pytest.fixture(scope="module")
def problems(data_folder):
    return read_rows(data_folder / "HumanEval.jsonl.gz")


def answering(running: ThreadingHTTPServer) -> Iterator[ThreadingHTTPServer]:
    """The server while a thread lets it answer."""
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()


@pytest.fixture
def judge() -> Iterator[ThreadingHTTPServer]:
    """A judge that answers what a test lets it answer."""
    with judge_server.Server() as running:
        yield from answering(running)


@pytest.fixture
def server(checkpoint) -> Iterator[ThreadingHTTPServer]:
    """The tiny checkpoint behind a stdlib server; a test may change what it answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.change, running.refusal, running.refused = lambda choice: None, None, 0
        running.folder, running.left, running.lock = checkpoint, 10**9, threading.Lock()
        running.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        running.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        running.url = f"http://127.0.0.1:{running.server_address[1]}/v1"
        yield from answering(running)
