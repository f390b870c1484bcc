"""Memory of a long routing trace: 100 million token-layers written, then read.

    python eval/bench/traces.py [--token-layers 100000000] [--save]

Writes a synthetic trace (26 layers, 6 of 64 experts, weights, token ids) batch by batch, reads its
ids and weights chunk by chunk, and prints the resident memory after each tenth as JSON. The goal:
no growth. ``--save`` also writes it to ``eval/bench/results/traces.json``.
"""

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from saved import add_save, finish

from moe_finetune.routing.trace import RoutingTrace, TraceWriter

LAYERS, EXPERTS, WIDTH, BATCH = 26, 64, 6, 4096


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def write(folder: Path, batches: int) -> list[float]:
    rng = np.random.default_rng(0)
    # A few batches in turn: generating new ones would take longer than writing them.
    scores = rng.random((4, BATCH, LAYERS, EXPERTS), np.float32)
    ids = np.argpartition(-scores, WIDTH - 1, -1)[..., :WIDTH].astype(np.int16)
    weights = rng.random(ids.shape, np.float32)
    tokens = rng.integers(0, 100_000, (4, BATCH))
    del scores
    sizes = []
    with TraceWriter(
        folder,
        model_type="deepseek_v2",
        checkpoint="synthetic",
        layers=range(1, LAYERS + 1),
        num_experts=EXPERTS,
        top_k=WIDTH,
    ) as writer:
        for number in range(batches):
            turn = number % 4
            seq = number * 8 + np.arange(BATCH) // 512
            writer.append(ids[turn], weights[turn], seq, token_ids_T=tokens[turn])
            if (number + 1) * 10 // batches > number * 10 // batches:
                sizes.append(round(resident_mb(), 1))
    return sizes


def read(folder: Path) -> tuple[list[float], int]:
    trace = RoutingTrace.open(folder)
    sizes, seen, load = [], 0, np.zeros(EXPERTS, np.int64)
    for chunk in trace.chunks("ids", "weights", "seq", "token_ids"):
        before, seen = seen, seen + chunk.tokens
        load += np.bincount(chunk["ids"].ravel(), minlength=EXPERTS)
        if seen * 10 // trace.num_tokens > before * 10 // trace.num_tokens:
            sizes.append(round(resident_mb(), 1))
    assert load.sum() == trace.num_tokens * LAYERS * WIDTH
    return sizes, seen


def growth(sizes: list[float]) -> float:
    """MB by which the second half's largest size exceeds the first half's."""
    half = len(sizes) // 2
    return round(max(sizes[half:]) - max(sizes[:half]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--token-layers", type=int, default=100_000_000)
    add_save(parser, "traces")
    options = parser.parse_args()
    batches = -(-options.token_layers // (BATCH * LAYERS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "trace"
        start = time.perf_counter()
        writing = write(folder, batches)
        written = time.perf_counter() - start
        size = sum(path.stat().st_size for path in folder.iterdir())
        chunks = len(list(folder.glob("*.npz")))
        start = time.perf_counter()
        reading, tokens = read(folder)
        seconds = time.perf_counter() - start
    result = {
        "token_layers": tokens * LAYERS,
        "chunks": chunks,
        "disk_gb": round(size / 1e9, 2),
        "write_seconds": round(written, 1),
        "read_seconds": round(seconds, 1),
        "resident_mb_writing": writing,
        "resident_mb_reading": reading,
        "growth_mb_writing": growth(writing),
        "growth_mb_reading": growth(reading),
    }
    finish(options, result)


if __name__ == "__main__":
    main()
