from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("MOE_FINETUNE_DATA", beside))
    if not (folder / "gsm8k_test.jsonl").is_file():
        pytest.skip(f"no shared data at {folder}; set MOE_FINETUNE_DATA")
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny Qwen3-MoE with random weights, shared by all tests that only read it."""
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "qwen3_moe")


@pytest.fixture(scope="session")
def vllm_engine(checkpoint):
    """One vLLM engine for the whole session."""
    from moe_finetune.errors import DependencyError
    from moe_finetune.evaluation.backends import open_backend

    try:
        backend = open_backend(checkpoint, "vllm", vllm={"max_num_seqs": 64})
    except DependencyError as error:
        pytest.skip(str(error))
    with backend:
        yield backend
