"""Seconds and memory of what reads or writes long streams, each in a process of its own.

    python eval/bench/streams.py [--parts data trace summary] [--tokens 1000000] [--save]

``data``: rows of that many tokens are prepared with an empty cache, then again from it. ``trace``:
a synthetic routing trace (26 layers, 6 of 64 experts) is written batch by batch and read chunk by
chunk. ``summary``: the metrics of that trace. Memory is anonymous memory (without mapped files)
above that at the start; the goal is that it does not grow with the tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from saved import add_save, finish

LAYERS, EXPERTS, TOP_K, BATCH = 26, 64, 6, 4096


def write_rows(folder: Path, tokens: int) -> None:
    """Rows of 400 tokens (bytes) of random words."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 7)) for _ in range(4096)]
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(tokens // 400):
            text = " ".join(words[i] for i in rng.integers(0, len(words), 64))
            out.write(json.dumps({"prompt": text[:150], "completion": text[150:399]}) + "\n")


def prepare(folder: Path, tokens: int) -> None:
    """Prepare the rows, or load them from the cache, and read each once, as an epoch does."""
    from moe_finetune.data.examples import load_examples
    from moe_finetune.recipe.sections import DataSection
    from moe_finetune.upcycle.tokenizer import train_tokenizer

    section = DataSection(train=str(folder / "rows.jsonl"), max_length=4096, num_proc=2)
    train = load_examples(section, train_tokenizer([], 300), 0).train
    assert sum(len(ids) for batch in train.iter(1000) for ids in batch["input_ids"]) > 0.9 * tokens


def write_trace(folder: Path, tokens: int) -> None:
    """A few batches in turn: generating new ones would take longer than writing them."""
    from moe_finetune.routing.trace import TraceWriter

    rng = np.random.default_rng(0)
    scores = rng.random((4, BATCH, LAYERS, EXPERTS), np.float32)
    ids = np.argpartition(-scores, TOP_K - 1, -1)[..., :TOP_K].astype(np.int16)
    weights = rng.random(ids.shape, np.float32)
    facts: dict[str, Any] = {"model_type": "deepseek_v2", "checkpoint": "synthetic"}
    facts |= {"layers": range(1, LAYERS + 1), "num_experts": EXPERTS, "top_k": TOP_K}
    with TraceWriter(folder / "trace", **facts) as writer:
        for number in range(-(-tokens // BATCH)):
            seq = number * 8 + np.arange(BATCH) // 512
            writer.append(ids[number % 4], weights[number % 4], seq)


def read_trace(folder: Path, tokens: int) -> None:
    """Read ids and weights chunk by chunk."""
    from moe_finetune.routing.trace import RoutingTrace

    chunks = RoutingTrace.open(folder / "trace").chunks("ids", "weights", "seq")
    assert sum(chunk.tokens for chunk in chunks) >= tokens


def summarize(folder: Path, tokens: int) -> None:
    """The metrics of the whole trace."""
    from moe_finetune.routing.summary import summarize_trace
    from moe_finetune.routing.trace import RoutingTrace

    summarize_trace(RoutingTrace.open(folder / "trace"))


STEPS: dict[str, Callable[[Path, int], None]] = {
    f.__name__: f for f in (write_rows, prepare, write_trace, read_trace, summarize)
}
PARTS = {
    "data": ("write_rows", "prepare", "prepare"),
    "trace": ("write_trace", "read_trace"),
    "summary": ("write_trace", "summarize"),
}


def anonymous_mb() -> float:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def measure(step: str, folder: Path, tokens: int) -> dict[str, float]:
    """One step in this process, after its imports."""
    import moe_finetune.data.examples
    import moe_finetune.routing.summary
    import moe_finetune.upcycle.tokenizer  # noqa: F401

    peak, done = [before := anonymous_mb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak.append(anonymous_mb())

    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    STEPS[step](folder, tokens)
    seconds = time.perf_counter() - start
    done.set()
    return {"seconds": round(seconds, 1), "peak_mb_above_start": round(max(peak) - before, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    add_save(parser, "streams")
    arguments = parser.parse_args()
    if arguments.child:
        step, folder = arguments.child
        print(json.dumps(measure(step, Path(folder), arguments.tokens)))
        return
    figures: dict[str, Any] = {}
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "MOE_FINETUNE_CACHE": str(Path(folder) / "cache")}
            for number, step in enumerate(PARTS[part]):
                command = [sys.executable, __file__, "--tokens", str(arguments.tokens)]
                command += ["--child", step, folder]
                done = subprocess.run(
                    command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                )
                figures[f"{part}/{number}_{step}"] = json.loads(done.stdout.splitlines()[-1])
    finish(arguments, figures)


if __name__ == "__main__":
    main()
