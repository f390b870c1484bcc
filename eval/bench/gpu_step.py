"""A training step on one GPU at the true widths of published checkpoints.

LoRA on all experts in bfloat16 over random weights, at two numbers of layers; the difference gives
a layer's cost, and from it the full depth's. Variants run interleaved in one process; figures are
medians.

    python eval/bench/gpu_step.py --write gpu-step.json                  # four checkpoints
    python eval/bench/gpu_step.py --geometry qwen3_30b_a3b --layers 8
    python eval/bench/gpu_step.py --device cpu --tiny                    # the same in seconds
"""

import argparse
import gc
import math
import sys
import time
from typing import Any

import torch
from geometries import GEOMETRIES, config_of
from saved import add_save, finish
from timing import add_step, batch_of, cuda_peak_gb, ratios, time_steps, timed_row
from variants import variants_of

from moe_finetune.models import family_of
from moe_finetune.quantization.weight import resident_bytes

SCHEMA = 1
WIDTHS = ("qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v2_lite", "moonlight_16b_a3b")
DEPTH = {"qwen3_30b_a3b": 48, "gpt_oss_20b": 24, "deepseek_v2_lite": 27, "moonlight_16b_a3b": 27}
PRESETS = (
    "orthogonal_variance",
    "specialization_coupling",
    "erc",
    "supervised_routing",
    "dpp",
    "ncl",
)
"""The losses of the five papers."""
STOCK = ("stock-peft, grouped_mm", "stock-peft, eager")
NF4 = "ours, nf4"
VARIANTS = ("attention-only", *STOCK, "ours", *(f"ours+{name}" for name in PRESETS), NF4)
RATIOS = {
    **{f"time: {n} / ours": (n, "ours", "median_s") for n in VARIANTS if n.startswith("ours+")},
    "time: ours / attention-only": ("ours", "attention-only", "median_s"),
    **{f"time: {name} / ours": (name, "ours", "median_s") for name in (*STOCK, NF4)},
    "memory: ours / stock-peft, grouped_mm": ("ours", STOCK[0], "gb"),
}
COPIES_OF_WEIGHTS = 8
"""A layer's weights that are in memory at once, estimated: two models of bfloat16, one of nf4, and
what stock PEFT makes of the stack."""


def measure(arguments: argparse.Namespace, names: list[str], until: float) -> dict[str, Any]:
    """Seconds and memory of each variant at ``arguments.layers``."""
    variants = variants_of(arguments, names)
    batch = batch_of(arguments, config_of(arguments).vocab_size)
    rows: dict[str, Any] = {}
    for name, variant in list(variants.items()):
        transient = None  # not measured on a CPU
        try:
            if arguments.device == "cuda":
                transient = cuda_peak_gb(lambda variant=variant: variant.step(batch))
            else:
                variant.step(batch)
        except torch.OutOfMemoryError:
            rows[name] = {"outcome": "out of memory"}
            del variants[name]
            torch.cuda.empty_cache()
            continue
        weights = resident_bytes(variant.model) / 1e9
        whole = None if transient is None else weights + transient
        rows[name] = {"outcome": "ok", "weights_gb": weights, "step_gb": transient, "gb": whole}
    seconds, _ = time_steps(variants, batch, arguments, until=until)
    tokens = batch["input_ids"].numel()
    for name, values in seconds.items():
        rows[name] |= timed_row(values, tokens)
    return {"layers": arguments.layers, "tokens": tokens, "rows": rows}


def depths(arguments: argparse.Namespace, geometry: str) -> tuple[int, int]:
    """Two numbers of layers: the most that fit, and half of that."""
    config = GEOMETRIES[geometry][0]()
    # Coupling joins two MoE layers, and some models begin with a dense one.
    first = 2 + (getattr(config, "first_k_dense_replace", 0) or 0)
    if arguments.layers:
        return max(first, arguments.layers // 2), max(first + 1, arguments.layers)
    if arguments.device != "cuda":
        return first, first + 2
    family = family_of(config)
    places = family.places(config)
    layer = 6 * places.num_experts * places.expert_width * config.hidden_size
    fixed = 4 * 4 * config.vocab_size * config.hidden_size  # embeddings of two models, and logits
    free = 0.85 * torch.cuda.mem_get_info()[0] - fixed
    layers = max(first + 2, min(DEPTH[geometry], int(free // (layer * COPIES_OF_WEIGHTS))))
    return max(first, layers // 2), layers


def per_layer(shallow: dict[str, Any], deep: dict[str, Any], depth: int) -> dict[str, Any]:
    """Seconds and GB that a layer adds, and the linear extrapolation to the full depth."""
    added = deep["layers"] - shallow["layers"]
    projected = {}
    for name, row in deep["rows"].items():
        before = shallow["rows"].get(name, {})
        if "median_s" not in row or "median_s" not in before:
            continue
        layer_s = (row["median_s"] - before["median_s"]) / added
        whole_s = row["median_s"] + (depth - deep["layers"]) * layer_s
        projected[name] = {
            "layer_s": layer_s,
            "whole_depth_s": whole_s,
            "whole_depth_tokens_per_s": deep["tokens"] / whole_s if whole_s > 0 else None,
        }
        if row["gb"] is not None:
            layer_gb = (row["gb"] - before["gb"]) / added
            whole_gb = row["gb"] + (depth - deep["layers"]) * layer_gb
            projected[name] |= {"layer_gb": layer_gb, "whole_depth_gb": whole_gb}
    return projected


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of every geometry: figures, or the reason why there are none."""
    started = time.monotonic()
    results: dict[str, Any] = {}
    for done, geometry in enumerate(arguments.geometry):
        used = time.monotonic() - started
        share = (arguments.seconds - used) / (len(arguments.geometry) - done)
        if share < arguments.least_seconds:
            results[geometry] = {"outcome": f"not run: {used:.0f} s were used"}
        else:
            results[geometry] = one(arguments, geometry, share)
    return {"schema": SCHEMA, "geometries": results}


def one(arguments: argparse.Namespace, geometry: str, share: float) -> dict[str, Any]:
    """One geometry at two depths, in ``share`` seconds."""
    begun = time.monotonic()
    both = []
    for part, layers in enumerate(depths(arguments, geometry), 1):
        values = vars(arguments) | {"geometry": geometry, "layers": layers}
        print(f"{geometry}, {layers} layers ...", flush=True)
        named = argparse.Namespace(**values)
        both.append(measure(named, list(arguments.variants), begun + share * part / 2))
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    depth = DEPTH.get(geometry, both[1]["layers"])
    return {
        "outcome": "ok",
        "depth": depth,
        "measured": both,
        "per_layer": per_layer(both[0], both[1], depth),
        "ratios": ratios(both[1]["rows"], RATIOS),
    }


def table(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = []
    for geometry, found in result["geometries"].items():
        if found["outcome"] != "ok":
            lines.append(f"{geometry}: {found['outcome']}")
            continue
        deep = found["measured"][1]
        lines.append(f"{geometry}, {deep['layers']} of {found['depth']} layers")
        for name, row in deep["rows"].items():
            if "median_s" not in row:
                lines.append(f"  {name:34s}{row['outcome']}")
                continue
            step = "-" if row["step_gb"] is None else f"{row['step_gb']:.2f}"
            layer = found["per_layer"].get(name, {}).get("layer_s", math.nan)
            lines.append(
                f"  {name:34s}{row['median_s'] * 1e3:9.1f} ms{row['tokens_per_s']:10.0f} tokens/s"
                f"{layer * 1e3:9.2f} ms a layer{row['weights_gb']:8.2f} GB + {step} GB"
            )
        for label, value in found["ratios"].items():
            lines.append(f"  {label:50s}{value:.3f}")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--geometry", nargs="*", choices=sorted(GEOMETRIES), default=list(WIDTHS))
    add_step(parser, tokens=4096, length=4096, rank=16, dtype="bfloat16", rounds=10, warmup=2)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole command")
    parser.add_argument("--least-seconds", type=float, default=30.0, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU and seconds")
    add_save(parser, "gpu_step")
    arguments = parser.parse_args(given)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --tiny runs what a CPU can")
    arguments.train_router = True
    if arguments.tiny:
        arguments.geometry, arguments.layers, arguments.dtype = ["tiny"], 3, "float32"
        arguments.tokens, arguments.length, arguments.rank = 64, 32, 8
        arguments.rounds, arguments.warmup = 1, 0
    result = run(arguments)
    print(table(result))
    finish(arguments, result, show=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
