"""Seconds until the program says something: ``--help``, ``train``'s first line, its first step.

    python eval/bench/start.py --rounds 5 [--save]

``train`` fine-tunes the demo's checkpoint; each round starts each command once, in turn.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from saved import add_save, finish

from moe_finetune.demo.demo import recipe_items
from moe_finetune.recipe.yaml_tree import recipes_folder

PROGRAM = [sys.executable, "-m", "moe_finetune.cli"]


def times(command: list[str], marks: dict[str, str]) -> dict[str, float]:
    """Seconds until the first line that contains each mark; the process is ended after the last."""
    start, found = time.perf_counter(), dict[str, float]()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    for line in process.stdout:
        found |= {n: time.perf_counter() - start for n, m in marks.items()
                  if n not in found and m in line}  # fmt: skip
        if len(found) == len(marks):
            break
    process.kill()
    process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    add_save(parser, "start")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            items = recipe_items("aux_loss", recipes_folder() / "demo", "hf", steps=1)
            items = [item for item in items if not item.startswith("evaluation.")]
            train = [*PROGRAM, "train", *items, "evaluation=null", "export.merge=false"]
            train += ["export.verify=false", "trainer.logging_steps=1"]
            train += ["--output", str(Path(folder) / "run")]
            found = times([*PROGRAM, "--help"], {"help": "Usage"})
            found |= times(train, {"train, first line": "", "train, first step": "step 1/1"})
        for name, value in found.items():
            seconds.setdefault(name, []).append(value)
    finish(arguments, {name: {"median_s": statistics.median(values), "min_s": min(values)}
                       for name, values in seconds.items()})  # fmt: skip


if __name__ == "__main__":
    main()
