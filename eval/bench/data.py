"""Memory and seconds to prepare training data, and to load prepared data again.

    python eval/bench/data.py [--tokens 100000000] [--processes 2] [--save]

Writes JSON lines of prompts and completions whose tokens (bytes) add up to ``--tokens``, prepares
them in a separate process with an empty cache, and again in another process with that cache; each
then reads the whole dataset once, like an epoch. Prints, as JSON, seconds, the peak of each
process's anonymous memory (without mapped files), and the bytes on disk per token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from saved import add_save, finish

PROMPT, COMPLETION = 150, 249  # and the end of text: 400 tokens per row


def write_rows(file: Path, tokens: int) -> int:
    """Write rows of random words; return their number."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 7)) for _ in range(4096)]
    rows = tokens // (PROMPT + COMPLETION + 1)
    with file.open("w") as out:
        for start in range(0, rows, 10_000):
            picked = rng.integers(0, len(words), (min(10_000, rows - start), 64))
            for row in picked:
                text = " ".join(words[i] for i in row)
                pair = {"prompt": text[:PROMPT], "completion": text[PROMPT : PROMPT + COMPLETION]}
                out.write(json.dumps(pair) + "\n")
    return rows


def anonymous_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("this kernel does not report anonymous memory")


def measured(file: str, processes: int) -> dict[str, Any]:
    """Time and memory of this process to prepare ``file`` and read it once."""
    from moe_finetune.data.examples import load_examples
    from moe_finetune.recipe.sections import DataSection
    from moe_finetune.upcycle.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([], 300)
    section = DataSection(train=file, max_length=4096, num_proc=processes)
    peak, done = [before := anonymous_mb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak.append(anonymous_mb())

    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    train = load_examples(section, tokenizer, 0).train
    prepared = time.perf_counter() - start
    tokens = sum(len(ids) for batch in train.iter(1000) for ids in batch["input_ids"])
    done.set()
    folder = Path(train.cache_files[0]["filename"]).parents[1]
    on_disk = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return {
        "seconds": round(prepared, 1),
        "seconds_of_an_epoch": round(time.perf_counter() - start - prepared, 1),
        "tokens": tokens,
        "peak_mb_above_start": round(max(peak) - before, 1),
        "bytes_a_token_on_disk": round(on_disk / tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    add_save(parser, "data")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measured(arguments.child, arguments.processes)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        figures: dict[str, Any] = {"rows": write_rows(file, arguments.tokens)}
        figures["file_mb"] = round(file.stat().st_size / 1e6, 1)
        command = [sys.executable, __file__, "--child", str(file)]
        command += ["--processes", str(arguments.processes)]
        environment = {**os.environ, "MOE_FINETUNE_CACHE": str(Path(scratch) / "cache")}
        for name in ("first", "again"):
            run = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            figures[name] = json.loads(run.stdout.splitlines()[-1])
    arguments.child = None
    finish(arguments, figures)


if __name__ == "__main__":
    main()
