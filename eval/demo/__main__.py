"""Make the demo's checkpoint and rows again: ``python -m eval.demo FOLDER``.

The same Python, versions, processor and number of threads give the same bytes.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch

from eval.demo.pretrain import FAMILIES, Pretraining, pretrain
from eval.demo.rows import write_rows
from eval.demo.text import read_documents


def main() -> None:
    """Write checkpoint and rows, and print the weights' hash."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_moe")
    parser.add_argument("--steps", type=int, default=Pretraining.steps)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    start = time.perf_counter()
    checkpoint = arguments.folder / "checkpoint"
    write_rows(arguments.folder, arguments.seed)
    config = Pretraining(family=arguments.family, steps=arguments.steps)
    pretrain(checkpoint, read_documents(), arguments.seed, config, show=_show)
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    print(f"{checkpoint}/model.safetensors: sha256 {digest}, {time.perf_counter() - start:.0f} s")


def _show(step: int, text: float, answers: float) -> None:
    if step % 25 == 0:
        print(f"step {step}: text {text:.3f}, answers {answers:.3f} nats a token", flush=True)


if __name__ == "__main__":
    main()
