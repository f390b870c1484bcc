"""Costs and savings of frozen weights in 4 bits: memory, loading, steps, held-out loss.

Resident bytes and loading time are for a checkpoint with Qwen3-30B-A3B's widths and a small
vocabulary, written by this script (5 GB for four layers); loading is measured in a child process
for each. Steps of the quantized and the unquantized model are interleaved in one process and
measured in processor time, which other programs affect least. The part ``demo`` fine-tunes the
demo's checkpoint once per format, from the same seed, and scores its held-out rows.

    python eval/bench/quantization.py --save
    python eval/bench/quantization.py --parts demo
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from checkpoints import write_checkpoint
from measured import resident
from saved import add_save, finish
from variants import Variant, build

from moe_finetune.quantization.weight import resident_bytes

PARTS = ("load", "step", "demo")
VOCABULARY = 4096


def load_child(folder: str, kind: str) -> None:
    """Load once and print time and memory; runs in a separate process."""
    from moe_finetune import load_model
    from moe_finetune.quantization.codec import bitsandbytes

    bitsandbytes()
    torch.ones(64, 64) @ torch.ones(64, 64)
    before, start = resident("RssAnon"), time.perf_counter()  # mapped files can be taken back
    done, peak = threading.Event(), [before]

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, "bfloat16", quantization=None if kind == "none" else kind)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    figures = {
        "weights_gb": resident_bytes(model) / 1e9,
        "resident_gb": (resident("RssAnon") - before) / 1e9,
        "peak_gb": (peak[0] - before) / 1e9,
        "seconds": seconds,
    }
    print(json.dumps(figures))


def bench_load(arguments) -> dict:
    found = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        write_checkpoint(Path(folder), arguments.layers, VOCABULARY)
        for kind in ("none", "nf4"):
            command = [sys.executable, __file__, "--child", folder, kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[kind] = json.loads(done.stdout.strip().splitlines()[-1])
    row = found["nf4"]
    row["weights_ratio"] = row["weights_gb"] / found["none"]["weights_gb"]
    row["peak_gb_beyond_weights"] = row["peak_gb"] - row["weights_gb"]
    return found


def bench_step(arguments) -> dict:
    found = {}
    arguments.geometry, arguments.gradient_checkpointing = "small-cpu", False
    arguments.train_router, arguments.rank, arguments.device = True, 32, "cpu"
    layers, arguments.layers = arguments.layers, None
    for dtype in arguments.dtypes:
        arguments.dtype = dtype
        variants = {}
        for kind in ("none", "nf4"):
            variants[kind] = Variant("ours", build(arguments, True, kind == "nf4"))
        for tokens in arguments.tokens:
            ids = torch.randint(0, VOCABULARY, (max(tokens // 512, 1), min(tokens, 512)))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            for number in range(arguments.rounds + 1):
                order = list(variants) if number % 2 == 0 else list(variants)[::-1]
                for name in order:
                    start = time.process_time()
                    variants[name].step(batch)
                    if number:
                        seconds[name].append(time.process_time() - start)
            row = {name: statistics.median(taken) for name, taken in seconds.items()}
            row["nf4/none"] = row["nf4"] / row["none"]
            # The median of per-round ratios, because the machine is noisy.
            pairs = zip(seconds["nf4"], seconds["none"], strict=True)
            row["nf4/none, by rounds"] = statistics.median(a / b for a, b in pairs)
            found[f"{dtype}, {tokens} tokens"] = row
    arguments.layers = layers
    return found


def bench_demo(arguments) -> dict:
    """Held-out loss after the demo's fine-tune, and before it, in each format."""
    from moe_finetune.demo.demo import recipe_items
    from moe_finetune.recipe.schema import Recipe, load_recipe
    from moe_finetune.recipe.yaml_tree import recipes_folder
    from moe_finetune.run import run_recipe

    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        file, *keys = recipe_items("orthogonal_variance", recipes_folder() / "demo", "hf")
        plain = load_recipe(recipes_folder().parent / file, keys)
        for kind in ("none", "nf4"):
            values = plain.to_mapping() | {"evaluation": None, "export": {"merge": False}}
            values["model"] |= {"quantization": kind}
            values["trainer"] |= {"eval_strategy": "steps", "report_to": "none"}
            run = run_recipe(Recipe.model_validate(values), Path(folder) / kind)
            lines = (run / "metrics.jsonl").read_text().splitlines()
            losses = [row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row]
            found[kind] = {"held_out": losses[-1], "steps": plain.trainer["max_steps"]}
    found["nf4"]["ratio"] = found["nf4"]["held_out"] / found["none"]["held_out"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--scratch", default=None, help="folder for the checkpoint")
    add_save(parser, "quantization")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        load_child(*arguments.child)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Not "load": under that name every result has the machine's load.
    parts = {
        "load": ("loading", bench_load),
        "step": ("step", bench_step),
        "demo": ("demo", bench_demo),
    }
    chosen = [parts[name] for name in arguments.parts]
    finish(arguments, {key: bench(arguments) for key, bench in chosen})


if __name__ == "__main__":
    main()
