"""A small local suite: a generation task and a log-likelihood task, with examples."""

import json
import random
from pathlib import Path

import yaml


def write_suite(folder: Path, items: int = 23, shots: int = 2) -> Path:
    """Write data and a suite over it; return the suite's file."""
    draw = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)

    def sums(n: int) -> list[dict]:
        pairs = [(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(n)]
        return [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]

    def choices(n: int) -> list[dict]:
        rows = []
        for _ in range(n):
            words = draw.sample(["red", "green", "deep blue", "black", "white"], 3)
            rows.append({"question": f"It is {words[0]}, so it is", "choices": words, "answer": 0})
        return rows

    files = {
        "sums_test": sums(items),
        "sums_train": sums(5),
        "colours_test": choices(items + 4),
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    suite = {
        "name": "local",
        "tasks": [
            {
                "task": "sums", "template": "local_exact_match", "version": 1.0, "shots": shots,
                "metric": "exact_match", "max_tokens": 6,
                "files": {"test": "sums_test.jsonl", "train": "sums_train.jsonl"},
            },
            {
                "task": "colours", "template": "local_loglikelihood", "version": 1.0, "shots": 0,
                "metric": "acc", "chance": 1 / 3, "files": {"test": "colours_test.jsonl"},
            },
        ],
    }  # fmt: skip
    path = folder / "local.yaml"
    path.write_text(yaml.safe_dump(suite))
    return path
