"""Kill a merge at random moments: the output must be absent or whole, a rerun must work.

    python eval/bench/merge_kill.py --kills 30

Moments are drawn uniformly over the duration of an undisturbed merge. After each SIGKILL the target
is checked, the merge runs again to its end, and its files are compared with those of an undisturbed
merge. Results go to ``eval/bench/results/merge_kill.json``.
"""

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from merge import make_adapter, make_base
from saved import add_save, finish

# Reports when it begins, so that the kill does not fall into imports.
MERGE = """
import sys
import torch
from moe_finetune.checkpoint import merge_adapter, verify  # noqa: F401
print("begin", flush=True)
sys.stdin.readline()
merge_adapter(*sys.argv[1:4])
"""


def start(base: Path, adapter: Path, target: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", MERGE, str(base), str(adapter), str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "begin\n"
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()
    return process


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    add_save(parser, "merge_kill")
    options = parser.parse_args()
    chooser = random.Random(options.seed)
    work = Path(tempfile.mkdtemp(prefix="merge-kill-"))
    try:
        base, adapter, place = work / "base", work / "adapter", work / "place"
        layers = make_base(base, options.gigabytes, 24, 9000, shard_bytes=120_000_000)
        make_adapter(adapter, layers, 24)
        place.mkdir()
        process = start(base, adapter, place / "whole")
        started = time.perf_counter()
        assert process.wait() == 0
        seconds = time.perf_counter() - started
        wanted = digests(place / "whole")
        counts = dict.fromkeys(("absent", "whole", "half", "partial_seen", "rerun_ok", "late"), 0)
        for number in range(options.kills):
            target = place / "merged"
            process = start(base, adapter, target)
            time.sleep(chooser.uniform(0, seconds))
            counts["late"] += process.poll() is not None
            process.kill()
            process.wait()
            counts["partial_seen"] += bool(list(place.glob(".merged.partial-*")))
            if not target.exists():
                counts["absent"] += 1
            else:
                counts["whole" if digests(target) == wanted else "half"] += 1
                shutil.rmtree(target)
            rerun = start(base, adapter, target)
            done = rerun.wait() == 0 and digests(target) == wanted
            left = [p.name for p in place.iterdir() if p.name not in ("whole", "merged")]
            counts["rerun_ok"] += done and not left
            shutil.rmtree(target, ignore_errors=True)
            print(f"{number + 1}/{options.kills} {counts}", flush=True)
        result = {
            "kills": options.kills,
            "checkpoint_gb": round(sum(p.stat().st_size for p in base.iterdir()) / 1e9, 3),
            "merge_seconds": round(seconds, 3),
            **counts,
        }
        finish(options, result)
        return int(counts["half"] > 0 or counts["rerun_ok"] < options.kills)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
