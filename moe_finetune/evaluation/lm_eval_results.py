"""Convert what lm-evaluation-harness returns to results.json and its samples."""

import math
from typing import Any

from moe_finetune.evaluation.lm_eval_tasks import Leaf
from moe_finetune.evaluation.results import Metric, TaskResult
from moe_finetune.evaluation.suites import SuiteTask
from moe_finetune.io.hashes import sha256_text, to_json


def _metrics(row: dict[str, Any]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for key, value in row.items():
        name, _, extraction = key.partition(",")
        if not extraction or name.endswith("_stderr") or isinstance(value, str):
            continue
        stderr = row.get(f"{name}_stderr,{extraction}")
        error = float(stderr) if isinstance(stderr, (int, float)) else None
        metrics[key] = {"value": float(value), "stderr": error}
    return metrics


def task_result(entry: SuiteTask, leaves: list[Leaf], raw: dict[str, Any]) -> TaskResult:
    """Return a suite line's result from what ``lm_eval.simple_evaluate`` returned."""
    rows = raw["results"]
    names = [leaf.name for leaf in leaves]
    group_row = raw.get("groups", {}).get(entry.task) or rows.get(entry.task)
    metrics = _metrics(group_row) if group_row else {}
    headline = f"{entry.metric},{entry.filter}"
    if entry.aggregate == "mean_acc":
        subtasks = [_metrics(rows[name]) for name in names]
        scored = all("acc,none" in metric for metric in subtasks)  # CoLA has none
        metrics = {headline: mean_accuracy(subtasks)} if scored else {}
    notes = []
    if any(leaf.examples and leaf.examples == leaf.tested for leaf in leaves):
        notes.append(
            "examples are other rows of the tested split, because the task has no separate "
            "split for them"
        )
    if headline not in metrics:
        notes.append(f"the task reports no {headline}; it reports {', '.join(metrics) or 'none'}")
    top = metrics.get(headline, {"value": None, "stderr": None})
    several = len(names) > 1
    directions = raw.get("higher_is_better", {})
    declared = {directions.get(name, {}).get(entry.metric) for name in names} - {None}
    return {
        "task": entry.task,
        "version": raw["versions"].get(entry.task, entry.version),
        "shots": entry.shots,
        "chat": entry.chat,
        "enable_thinking": entry.enable_thinking,
        "max_tokens": entry.max_tokens,
        "metric": entry.metric,
        "filter": entry.filter,
        # None if the tasks declare no direction (a program's pass@1), or different ones.
        "higher_is_better": declared.pop() if len(declared) == 1 else None,
        "value": top["value"],
        "stderr": top["stderr"],
        "chance": entry.chance,
        "n": sum(raw["n-samples"][name]["effective"] for name in names),
        "metrics": metrics,
        "subtasks": {
            name: {"metrics": _metrics(rows[name]), "n": raw["n-samples"][name]["effective"]}
            for name in (names if several else [])
        },
        "notes": notes,
    }


def sample_rows(by_task: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per task, item and filter, with hashes that let two runs be joined."""
    rows = []
    for name, samples in sorted(by_task.items()):
        for sample in sorted(samples, key=lambda s: (s["doc_id"], s["filter"])):
            arguments = [list(args) for args in sample["arguments"]]
            rows.append(
                {
                    "task": name,
                    "doc_id": sample["doc_id"],
                    "item": sample["doc_hash"],
                    "prompt_sha256": sha256_text(to_json(arguments)),
                    "filter": sample["filter"],
                    "doc": sample["doc"],
                    "prompts": arguments,
                    "target": sample["target"],
                    "replies": sample["resps"],
                    "extracted": sample["filtered_resps"],
                    "metrics": {name: sample[name] for name in sample["metrics"]},
                }
            )
    return rows


def mean_accuracy(subtasks: list[dict[str, Metric]]) -> Metric:
    """Return the unweighted mean of the tasks' accuracies.

    Args:
        subtasks: ``"metric,filter"`` -> value, of every task.
    """
    accuracies = [task["acc,none"] for task in subtasks]
    values = [metric["value"] for metric in accuracies]
    errors = [metric["stderr"] for metric in accuracies]
    stderr = None
    if None not in errors:
        stderr = math.hypot(*(error or 0.0 for error in errors)) / len(accuracies)
    return {"value": sum(v for v in values if v is not None) / len(accuracies), "stderr": stderr}
