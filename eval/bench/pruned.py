"""The demo's checkpoint with 75 and 50 % of its experts, before and after a short fine-tune.

Experts are kept by REAP, by their tokens, or at random; the recovery is LoRA with ``none``, and for
REAP also with ``orthogonal_variance``. The baseline is the whole checkpoint with the same
fine-tune.

    python eval/bench/pruned.py --save
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from hot_experts import traced
from saved import add_save, finish
from short_run import CHECKPOINT, demo_rows, fine_tune, paired, scores

from moe_finetune import load_model
from moe_finetune.checkpoint.prune import prune_experts
from moe_finetune.lora.select import expert_relevance, kept_experts, reap_relevance

SHARES = (0.75, 0.5)
WAYS = ("reap", "token", "random")
METHODS = {"none": "none", "ov": {"preset": "orthogonal_variance", "share": "recommended"}}


def main() -> None:
    """Prune, score, recover, score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    add_save(parser, "pruned")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = demo_rows()
    base = scores(load_model(CHECKPOINT, dtype="float32"), rows)
    print("base", base, flush=True)
    pruned: dict[str, list[dict]] = {}
    recovered: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        trace = traced(rows, Path(scratch) / "trace", norms=True)
        total, layers = trace.info.num_experts, trace.info.layers
        fields = [trace.load(field) for field in ("ids", "weights", "norms")]
        relevance = {
            "reap": reap_relevance(*fields, total),
            "token": expert_relevance(fields[0], None, total),
        }
        for seed in arguments.seeds:
            for method in arguments.methods:
                run = fine_tune(CHECKPOINT, rows, seed, METHODS[method])
                recovered.setdefault(f"whole, {method}", []).append(run)
                print("whole", method, run, flush=True)
            for share in SHARES:
                for way in WAYS:
                    chance_LE = np.random.default_rng(seed).random((len(layers), total))
                    kept = kept_experts(relevance.get(way, chance_LE), share)
                    name = f"{share:.0%}, {way}"
                    folder = Path(scratch) / f"{share}-{way}-{seed if way == 'random' else 'all'}"
                    if not folder.exists():
                        prune_experts(CHECKPOINT, dict(zip(layers, kept, strict=True)), folder)
                        result = scores(load_model(folder, dtype="float32"), rows)
                        pruned.setdefault(name, []).append(result)
                        print("pruned", name, result, flush=True)
                    for method in arguments.methods:
                        if method == "none" or way == "reap":
                            run = fine_tune(folder, rows, seed, METHODS[method])
                            recovered.setdefault(f"{name}, {method}", []).append(run)
                            print("recovered", name, method, run, flush=True)
    differences = {}
    for name, runs in recovered.items():
        way, method = name.rsplit(", ", 1)
        if way != "whole":
            against = recovered[f"whole, {method}"]
            keys = ("held_out", "sums")
            differences[f"{name} - whole"] = {key: paired(runs, against, key) for key in keys}
        for other in ("token", "random"):
            rival = name.replace("reap", other)
            if "reap" in name and rival in recovered:
                differences[f"{name} - {other}"] = {
                    key: paired(runs, recovered[rival], key) for key in ("held_out", "sums")
                }
    finish(
        arguments,
        {"base": base, "pruned": pruned, "recovered": recovered, "differences": differences},
    )


if __name__ == "__main__":
    main()
