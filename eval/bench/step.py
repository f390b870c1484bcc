"""Time and memory of a training step: attention-only LoRA, stock PEFT on experts, and ours.

All variants run interleaved in one process (A B C ... A B C ...), so that a noisy machine slows all
of them; compare the ratios of medians. Peak memory is measured in one child process per variant on
a CPU, and by the allocator on a GPU.

    python eval/bench/step.py --geometry small-cpu --rounds 12
    python eval/bench/step.py --geometry qwen3_30b_a3b --layers 4 --tokens 8192 --dtype bfloat16
"""

import argparse
import json
import statistics
import subprocess
import sys

import torch
from geometries import GEOMETRIES, config_of
from measured import resident
from saved import add_save, finish
from timing import add_step, batch_of, cuda_peak_gb, ratios, time_steps, timed_row
from variants import BASELINES, COMPILED, Variant, adapts_experts, build, variants_of

from moe_finetune.models import family_of


def peak_memory(arguments, name) -> float:
    """Peak GB of a variant's steps, minus the process's memory before the model was built."""
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        return cuda_peak_gb(lambda: few_steps(arguments, name))
    command = [sys.executable, __file__, "--memory-of", name, *sys.argv[1:]]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.strip().splitlines()[-1])["peak_gb"]


def few_steps(arguments, name) -> None:
    variant = Variant(name, build(arguments, adapts_experts(name)))
    batch = batch_of(arguments, config_of(arguments).vocab_size)
    for _ in range(3):
        variant.step(batch)


def memory_child(arguments) -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = resident("VmHWM")
    few_steps(arguments, arguments.memory_of)
    print(json.dumps({"peak_gb": (resident("VmHWM") - before) / 1e9}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="small-cpu")
    add_step(parser, tokens=1024, length=512, rank=32, dtype="float32", rounds=10, warmup=2)
    parser.add_argument(
        "--settle",
        type=int,
        default=0,
        help="untimed steps of a variant before its timed one, so that it finds the allocator as "
        "it left it and not as another variant did",
    )
    parser.add_argument("--train-router", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--variants", nargs="*")
    parser.add_argument(
        "--compiled", action="store_true", help="each variant a second time, its layers compiled"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="which other programs hardly lengthen"
    )
    parser.add_argument("--no-memory", action="store_true")
    add_save(parser, "step")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        memory_child(arguments)
        return
    config = config_of(arguments)
    moe_layers = len(family_of(config).places(config).moe_layers)
    if moe_layers == 0:
        parser.error(f"--layers {arguments.layers}: {arguments.geometry} begins with a dense layer")
    if moe_layers == 1:
        print("coupling joins two MoE layers; with the one here it is left out of every variant")
    names = arguments.variants or [
        *BASELINES,
        "ours",
        "ours+metrics",  # the callback's cheap metrics
        "ours+orthogonal_variance",
        "ours+specialization_coupling",
        "ours+erc",
        "ours+all",
    ]
    if arguments.compiled:
        names = [other for name in names for other in (name, name + COMPILED)]
    batch = batch_of(arguments, config.vocab_size)
    variants = variants_of(arguments, names)
    seconds, faults = time_steps(variants, batch, arguments, arguments.settle)
    memory = {} if arguments.no_memory else {n: peak_memory(arguments, n) for n in names}
    tokens = batch["input_ids"].numel()
    rows = {}
    for name in names:
        faulted = statistics.median(faults[name])
        rows[name] = timed_row(seconds[name], tokens) | {"page_faults": faulted,
                                                         "peak_gb": memory.get(name)}  # fmt: skip
    print(table(rows))
    found = ratios(rows, pairs_of(names))
    for name, value in found.items():
        print(f"{name:60s} {value:.3f}")
    finish(arguments, {"rows": rows, "ratios": found}, show=False)


def pairs_of(names) -> dict[str, tuple[str, str, str]]:
    """The ratios that the documentation quotes."""
    return {
        "time: all terms / stock PEFT without losses": ("ours+all", "stock-peft", "median_s"),
        "time: ours without losses / attention-only": ("ours", "attention-only", "median_s"),
        **{f"time: {n}{COMPILED} / {n}": (n + COMPILED, n, "median_s") for n in names},
        **{f"time: {n} / ours": (n, "ours", "median_s") for n in names if n.startswith("ours+")},
        "memory: all terms / ours": ("ours+all", "ours", "peak_gb"),
        "memory: ours / stock PEFT": ("ours", "stock-peft", "peak_gb"),
    }


def table(rows) -> str:
    titles = ("ms", "min", "tokens/s", "peak GB")
    lines = [" " * 34 + "".join(f"{title:>10s}" for title in titles)]
    for name, row in rows.items():
        peak = f"{row['peak_gb']:10.2f}" if row["peak_gb"] else f"{'-':>10s}"
        lines.append(
            f"{name:34s}{row['median_s'] * 1e3:10.0f}{row['min_s'] * 1e3:10.0f}"
            f"{row['tokens_per_s']:10.0f}{peak}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
