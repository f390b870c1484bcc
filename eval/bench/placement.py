"""Placement on the real routing of DeepSeek-V2-Lite, evaluated on unseen tokens.

    python eval/bench/placement.py [--data FOLDER] [--ranks 8] [--max-imbalance 1.3] [--save]

Plans on the first half of each trace's tokens and prints, as JSON, the table on the second half.
The goal with 8 ranks: cross-rank share below 0.70, ranks per token <= 3.5, imbalance <= 1.30,
planned within 20 s on 2 cores.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
from saved import add_save, finish
from simulate import compare_placements

from moe_finetune.placement import plan_placement
from moe_finetune.placement.bucketing import bucket_sequences
from moe_finetune.routing.trace import RoutingTrace

HIDDEN = 2048  # of DeepSeek-V2-Lite
HERE = Path(__file__).resolve()
DATA = Path(os.environ.get("MOE_FINETUNE_DATA", HERE.parents[3] / "shared" / "data"))


def bench(train: np.ndarray, test: np.ndarray, seq: np.ndarray, options) -> dict:
    experts = 64
    start, used = time.perf_counter(), time.process_time()
    ranks = plan_placement(
        train, experts, options.ranks, max_imbalance=options.max_imbalance, seed=options.seed
    )
    seconds, used = time.perf_counter() - start, time.process_time() - used
    buckets = bucket_sequences(test, seq, ranks)
    return {
        "tokens_planned_on": len(train),
        "tokens_judged_on": len(test),
        "plan_seconds": round(seconds, 2),
        "plan_cpu_seconds": round(used, 2),
        "placements": {
            name: {key: round(value, 4) for key, value in row.items()}
            for name, row in compare_placements(test, seq, ranks, hidden_size=HIDDEN).items()
        },
        "bucketing": {
            "sequences": len(buckets.sequences),
            "home_share_before": round(buckets.share_before, 4),
            "home_share_after": round(buckets.share_after, 4),
            "first_layer_before": round(buckets.first_layer_before, 4),
            "first_layer_after": round(buckets.first_layer_after, 4),
            "tokens_per_rank": buckets.tokens_R.tolist(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-imbalance", type=float, default=1.3)
    parser.add_argument("--seed", type=int, default=0)
    add_save(parser, "placement")
    options = parser.parse_args()
    halves: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for task in ("intent", "law"):
        trace = RoutingTrace.open(options.data / f"deepseek_v2_lite_routing_{task}.npz")
        ids, seq = trace.load("ids"), trace.load("seq")
        half = len(ids) // 2
        halves[task] = ids[:half], ids[half:], seq[half:]
    intent, law = halves["intent"], halves["law"]
    # Both tasks interleaved by sequence number, like requests to a server of both.
    halves["both"] = (
        np.concatenate([intent[0], law[0]]),
        np.concatenate([intent[1], law[1]]),
        np.concatenate([2 * intent[2], 2 * law[2] + 1]),
    )
    result = {task: bench(*arrays, options) for task, arrays in halves.items()}
    finish(options, result)


if __name__ == "__main__":
    main()
