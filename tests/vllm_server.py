"""A real vLLM engine in a process of its own, for tests: token ids in, greedy tokens out.

The engine starts processes and keeps memory until its process ends, so each call is one process
that loads one checkpoint, answers all prompts and leaves. Run as a module it is that process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@dataclass(frozen=True)
class Completion:
    """Generated token ids and the log-probability of each, in nats."""

    tokens: list[int]
    logprobs: list[float]


def complete(checkpoint: Path, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
    """Greedy float32 completions of exactly ``max_tokens`` tokens (no stop at the end token)."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(
            json.dumps(
                {"checkpoint": str(checkpoint), "prompts": prompts, "max_tokens": max_tokens}
            )
        )
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm_server", str(request), str(answer)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if done.returncode != 0:
            raise RuntimeError(f"vLLM failed on {checkpoint}:\n{done.stdout[-6000:]}")
        return [Completion(**row) for row in json.loads(answer.read_text())]


def greedy(checkpoint: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Only the tokens of :func:`complete`."""
    return [completion.tokens for completion in complete(checkpoint, prompts, max_tokens)]


def _serve(request: Path, answer: Path) -> None:
    from vllm import LLM, SamplingParams

    wanted = json.loads(request.read_text())
    engine = LLM(
        model=wanted["checkpoint"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        trust_remote_code=False,
        attention_backend="CPU_MLA",  # AMX's kernel of latent attention has no float32
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=wanted["max_tokens"], ignore_eos=True, logprobs=0
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in wanted["prompts"]], sampling)
    rows = []
    for output in outputs:
        best = output.outputs[0]
        tokens = list(best.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, best.logprobs, strict=True)]
        rows.append({"tokens": tokens, "logprobs": logprobs})
    answer.write_text(json.dumps(rows))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
