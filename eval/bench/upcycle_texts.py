"""Measure the memory that reading, tokenizing, counting and laying out texts takes.

A child process reads texts from JSONL files as ``moe-finetune upcycle`` does, tokenizes them,
counts tokens, clusters, lays out all training rows and reads them. The figures are its anonymous
memory (without file pages, which the system can drop) above its memory after imports: the largest
of ten measurements per second in each step. The texts are shuffled lines of the built-in corpus.
All files are deleted afterwards. Results go to ``eval/bench/results/upcycle_texts.json``.

    python eval/bench/upcycle_texts.py --gigabytes 1
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from saved import add_save, finish

EXPERTS, LENGTH, VOCABULARY, ROW_LINES = 8, 512, 8192, 40
CHILD = """
import json, sys, threading, time
from pathlib import Path
import numpy as np
from moe_finetune.models.loading import load_tokenizer
from moe_finetune.upcycle.categories import read_categories
from moe_finetune.upcycle.clustering import cluster_categories
from moe_finetune.upcycle.sections import TextSection
from moe_finetune.upcycle.texts import Texts

folder, vocabulary, experts, length = Path(sys.argv[1]), *map(int, sys.argv[2:])
largest = 0

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global largest
    while True:
        largest = max(largest, anonymous())
        time.sleep(0.1)

tokenizer = load_tokenizer(folder / "tokenizer")
tokenizer(["warm"])
cluster_categories(np.random.default_rng(0).integers(1, 9, (experts + 3, 11)), experts)
start = anonymous()
threading.Thread(target=watch, daemon=True).start()
peaks, seconds, began = {}, {}, time.perf_counter()

def done(name):
    peaks[name] = largest - start
    seconds[name] = round(time.perf_counter() - began, 1)

files = {path.stem: str(path) for path in sorted(folder.glob("*.jsonl"))}
categories = read_categories(TextSection(categories=files, max_length=length))
done("read")
texts = Texts.tokenize(categories, tokenizer, 0, folder)
done("tokenized")
cluster_categories(texts.counts(vocabulary), experts)
done("clustered")
rows = texts.blocks(range(len(files)), length, 0, folder / "rows.arrow")
done("laid out")
for i in range(len(rows)):
    rows[i]
done("rows read")
print(json.dumps({"start": start, "peaks": peaks, "seconds": seconds,
                  "tokens": int(texts.lengths_T.sum()), "texts": len(texts.split_T)}))
"""


def write_texts(folder: Path, size: int) -> int:
    """Write about ``size`` characters of shuffled lines, a file per category; return the number."""
    from moe_finetune.upcycle.corpus import read_corpus

    generator = np.random.default_rng(0)
    written = 0
    corpus = list(read_corpus().values())
    for category, texts in enumerate(corpus):
        lines = "\n".join(texts).splitlines()
        with (folder / f"kind{category:02d}.jsonl").open("w") as stream:
            while written < size * (category + 1) / len(corpus):
                picks = generator.integers(0, len(lines), ROW_LINES)
                text = "\n".join([lines[i] for i in picks])
                stream.write(json.dumps({"text": text}) + "\n")
                written += len(text)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of text")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the texts")
    add_save(parser, "upcycle_texts")
    options = parser.parse_args()
    from moe_finetune.upcycle.corpus import read_corpus
    from moe_finetune.upcycle.tokenizer import train_tokenizer

    work = Path(tempfile.mkdtemp(prefix="upcycle-texts-", dir=options.folder))
    try:
        written = write_texts(work, int(options.gigabytes * 1e9))
        some = (text for texts in read_corpus().values() for text in texts)
        train_tokenizer(some, VOCABULARY).save_pretrained(work / "tokenizer")
        sizes = map(str, (VOCABULARY, EXPERTS, LENGTH))
        command = [sys.executable, "-c", CHILD, str(work), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result = {
        "text_gb": round(written / 1e9, 3),
        "texts": found["texts"],
        "tokens": found["tokens"],
        "start_mb": round(found["start"] / 1e6),
        "anonymous_above_start_mb": {k: round(v / 1e6, 1) for k, v in found["peaks"].items()},
        "seconds": found["seconds"],
    }
    finish(options, result)


if __name__ == "__main__":
    main()
