"""A real vLLM engine in a process of its own, for tests: token ids in, greedy tokens out.

One process imports vLLM once and serves the checkpoints of a call in turn. What makes an engine
start slowly is left out where the model is tiny: compilation (torch.compile of group selection
alone takes a minute), a key-value cache of 1 GiB that is zeroed, Python's garbage collector over
all of vLLM's objects, and another process to look at the model's class. Run as a module it is that
process.
"""

import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
CACHE_BYTES = 64 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Completion:
    """Generated token ids and the log-probability of each, in nats."""

    tokens: list[int]
    logprobs: list[float]


def complete_each(
    checkpoints: Sequence[Path], prompts: list[list[int]] | list[list[dict]], max_tokens: int
) -> list[list[Completion] | str]:
    """Greedy float32 completions of exactly ``max_tokens`` tokens (no stop at the end token).

    Args:
        prompts: token ids, or chats: these are rendered by the checkpoint's own template, and their
            answers stop at its own end tokens.

    Returns:
        for each checkpoint its completions, or what went wrong with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        wanted = {
            "checkpoints": [str(path) for path in checkpoints],
            "prompts": prompts,
            "max_tokens": max_tokens,
        }
        request.write_text(json.dumps(wanted))
        environment = {
            **os.environ,
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.vllm_server", str(request), str(answer)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        if done.returncode != 0:
            raise RuntimeError(f"vLLM failed on {checkpoints}:\n{done.stdout[-6000:]}")
        return [
            found if isinstance(found, str) else [Completion(**row) for row in found]
            for found in json.loads(answer.read_text())
        ]


def _serve(request: Path, answer: Path) -> None:
    import vllm.model_executor.models.registry as registry
    from vllm.distributed import cleanup_dist_env_and_memory

    registry._run_in_subprocess = lambda look: look()  # there is no GPU that it might initialize
    wanted = json.loads(request.read_text())
    found: list[Any] = []
    for checkpoint in wanted["checkpoints"]:
        gc.collect()
        gc.freeze()
        try:
            found.append(_completions(checkpoint, wanted["prompts"], wanted["max_tokens"]))
        except Exception as error:  # whatever vLLM makes of a model that it cannot serve
            found.append(f"{type(error).__name__}: {error}")
        cleanup_dist_env_and_memory()
    answer.write_text(json.dumps(found))


def _completions(checkpoint: str, prompts: list[list[Any]], max_tokens: int) -> list[dict]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=CACHE_BYTES,
        trust_remote_code=False,
        attention_backend="CPU_MLA",  # AMX's kernel of latent attention has no float32
    )
    chats = isinstance(prompts[0][0], dict)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=not chats, logprobs=0
    )
    if chats:
        outputs = engine.chat(prompts, sampling)
    else:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    rows = []
    for output in outputs:
        best = output.outputs[0]
        tokens = list(best.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, best.logprobs, strict=True)]
        rows.append({"tokens": tokens, "logprobs": logprobs})
    engine.llm_engine.engine_core.shutdown()
    return rows


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
