"""A results.json with its samples, as an evaluation writes them."""

import numpy as np

from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import to_json
from moe_finetune.io.row_files import write_jsonl


def write_results(folder, tasks, prompts="same", complete=True, metric="acc", **declared):
    """Write results as the engine does: label -> list of item values."""
    entries = {}
    for name, values in tasks.items():
        rows = [
            {
                "task": name, "doc_id": i, "item": f"{name}-{i // 2}", "filter": f,
                "prompt_sha256": f"{prompts}-{i}", "metrics": {metric: v if f == "good" else 0.0},
                "replies": [["x"]],
            }
            for i, v in enumerate(values)
            for f in ("bad", "good")
        ]  # fmt: skip
        write_jsonl(folder / f"{name}.jsonl", rows)
        entries[name] = {
            "task": name, "metric": metric, "filter": "good", "n": len(values),
            "value": float(np.mean(values)), "samples": f"{name}.jsonl", **declared,
        }  # fmt: skip
    results = {"schema": 1, "complete": complete, "unfinished": [], "tasks": entries}
    write_atomic(folder / "results.json", to_json(results, sort=False))
    return folder
