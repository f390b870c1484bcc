"""Speed and memory of the metrics: 1 million tokens x 26 layers x 6 of 64 experts.

    python eval/bench/metrics.py [--tokens 1000000] [--sample 2000] [--save]

Writes a synthetic trace in chunks, summarizes it in a fresh process, and prints JSON. The goal: at
most 30 s and 2 GB for the summary on 2 cores. The routing is a topic model, not a real router; the
cost depends only on the sizes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from saved import add_save, finish

from moe_finetune.metrics import placement_metrics
from moe_finetune.routing.summary import summarize_trace
from moe_finetune.routing.trace import RoutingTrace, TraceWriter

LAYERS, EXPERTS, WIDTH, HIDDEN = 26, 64, 6, 2048


def write(folder: Path, tokens: int, sample: int) -> None:
    rng = np.random.default_rng(0)
    taste = rng.normal(size=(8, LAYERS, EXPERTS)).astype(np.float32)
    share = min(1.0, 1.02 * sample / tokens)
    with TraceWriter(
        folder,
        model_type="deepseek_v2",
        checkpoint="synthetic",
        layers=range(1, LAYERS + 1),
        num_experts=EXPERTS,
        top_k=WIDTH,
        hidden_size=HIDDEN,
        domains=["a", "b"],
        embedding_share=share,
    ) as writer:
        for start in range(0, tokens, 10_000):
            count = min(10_000, tokens - start)
            seq = (start + np.arange(count)) // 500
            noise = rng.standard_normal((count, LAYERS, EXPERTS), dtype=np.float32)
            logits = taste[seq % 8] + noise
            index = np.argpartition(-logits, WIDTH - 1, axis=-1)[..., :WIDTH]
            weights = np.take_along_axis(np.exp(logits), index, -1) / 100
            positions = writer.sample(count)
            embeddings = rng.standard_normal((len(positions), LAYERS, HIDDEN), dtype=np.float32)
            writer.append(
                index,
                weights,
                seq,
                "ab"[start // 10_000 % 2],
                positions_N=positions,
                embeddings_NLH=embeddings,
            )


def measure(folder: Path, sample: int) -> dict:
    start, used = time.perf_counter(), time.process_time()
    found = summarize_trace(RoutingTrace.open(folder), sample=sample)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    ids = RoutingTrace.open(folder).load("ids")
    start = time.perf_counter()
    ranks = np.tile(np.arange(EXPERTS) // 8, (LAYERS, 1))
    placed = placement_metrics(ids, ranks)
    return {
        "summary_seconds": round(seconds, 2),
        "summary_cpu_seconds": round(used, 2),
        "placement_metrics_seconds": round(time.perf_counter() - start, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "sample": found["sample"],
        "metrics": sorted(found["mean"]),
        "placement_metrics": placed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--sample", type=int, default=2000)
    parser.add_argument("--measure", type=Path, help="summarize this trace, in this process")
    add_save(parser, "metrics")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.sample)))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        start = time.perf_counter()
        write(trace, options.tokens, options.sample)
        written = time.perf_counter() - start
        size = sum(path.stat().st_size for path in trace.iterdir())
        command = [sys.executable, __file__, "--measure", str(trace)]
        command += ["--sample", str(options.sample)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = {
        "tokens": options.tokens,
        "layers": LAYERS,
        "experts": EXPERTS,
        "top_k": WIDTH,
        "make_and_write_seconds": round(written, 2),
        "trace_mb": round(size / 1e6, 1),
        **json.loads(done.stdout),
    }
    finish(options, result)


if __name__ == "__main__":
    main()
