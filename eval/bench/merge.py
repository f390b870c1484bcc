"""Merge a random adapter into a random checkpoint with Qwen3-30B-A3B's names and widths.

Measures wall time and peak memory (of a child process) of ``merge_adapter``, interleaved wall time
of ``cp -r`` of the same folder, and on request wall time of PEFT's ``merge_and_unload`` followed by
``save_pretrained``. All files are deleted afterwards.

    python eval/bench/merge.py --layers 5 --repeat 3 --peft      # 7.5 GB
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import write_adapter, write_checkpoint
from saved import add_save, finish

RANK, VOCABULARY = 32, 151936
MERGE = """
from moe_finetune.checkpoint.merge import merge_adapter
seconds = merge_adapter(sys.argv[1], sys.argv[2], sys.argv[3]).seconds
"""
PEFT = """
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload()
model.save_pretrained(sys.argv[3])
seconds = time.perf_counter() - started
"""
REPORT = """
import json, resource
print(json.dumps({"seconds": round(seconds, 3),
    "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)}))
"""


def child(code: str, *arguments: Path) -> dict:
    """Run ``code`` in a new interpreter; return its wall time, peak memory and report."""
    started = time.perf_counter()
    whole = f"import sys, time\nstarted = time.perf_counter(){code}{REPORT}"
    command = [sys.executable, "-c", whole, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr else "killed"}
    return {"process_seconds": time.perf_counter() - started, **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peft", action="store_true", help="measure PEFT's merge too")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the checkpoints")
    add_save(parser, "merge")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="merge-bench-", dir=options.folder) as folder:
        base, adapter, target = (Path(folder) / name for name in ("base", "adapter", "out"))
        write_checkpoint(base, options.layers, VOCABULARY)
        write_adapter(adapter, options.layers, RANK)
        os.sync()
        merges, copies, syncs = [], [], []
        for _ in range(options.repeat):
            started = time.perf_counter()
            subprocess.run(["cp", "-r", str(base), str(target)], check=True)
            copies.append(time.perf_counter() - started)
            os.sync()
            syncs.append(time.perf_counter() - started - copies[-1])
            shutil.rmtree(target)
            merges.append(child(MERGE, base, adapter, target))
            shutil.rmtree(target, ignore_errors=True)
            print(f"cp {copies[-1]:.1f} + sync {syncs[-1]:.1f} s, merge {merges[-1]}", flush=True)
        peft = child(PEFT, base, adapter, target) if options.peft else None
        wall = [merge["process_seconds"] for merge in merges]
        size = sum(file.stat().st_size for file in base.iterdir())
        result = {
            "checkpoint_gb": round(size / 1e9, 3),
            "layers": options.layers,
            "adapter_gb": round((adapter / "adapter_model.safetensors").stat().st_size / 1e9, 3),
            "rank": RANK,
            "merge": merges,
            "cp_seconds": [round(value, 3) for value in copies],
            "sync_after_cp_seconds": [round(value, 3) for value in syncs],
            "wall_over_cp": round(min(wall) / min(copies), 3),
            "wall_over_cp_each": [round(m / c, 3) for m, c in zip(wall, copies, strict=True)],
            "peak_gb": max(merge["peak_gb"] for merge in merges),
            "peft_merge_and_save": peft,
        }
        finish(options, result)


if __name__ == "__main__":
    main()
