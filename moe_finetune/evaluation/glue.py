"""GLUE's aggregate, which lm-eval lacks."""

from __future__ import annotations

from moe_finetune.evaluation.results import Metric

# Wang et al., GLUE (2019), section 3 and the public leaderboard: MCC for CoLA, the mean of accuracy
# and F1 for MRPC and QQP, accuracy elsewhere; a task with several numbers counts by their mean.
# STS-B is a regression that no language-model harness runs; the mean is over the other eight.
_COUNTED: dict[str, tuple[tuple[str, str], ...]] = {
    "cola": (("cola", "mcc"),),
    "sst2": (("sst2", "acc"),),
    "mrpc": (("mrpc", "acc"), ("mrpc", "f1")),
    "qqp": (("qqp", "acc"), ("qqp", "f1")),
    "mnli": (("mnli", "acc"), ("mnli_mismatch", "acc")),
    "qnli": (("qnli", "acc"),),
    "rte": (("rte", "acc"),),
    "wnli": (("wnli", "acc"),),
}


def glue_mean(subtasks: dict[str, dict[str, Metric]]) -> Metric:
    """Return the unweighted mean over GLUE's tasks, each by its own main metrics.

    Args:
        subtasks: lm-eval task name -> ``"metric,filter"`` -> value.

    Raises:
        KeyError: a task or metric is absent; a mean over fewer tasks would not be GLUE's.
    """
    tasks = []
    for parts in _COUNTED.values():
        values = [subtasks[name][f"{metric},none"]["value"] for name, metric in parts]
        tasks.append(sum(v for v in values if v is not None) / len(values))
    return {"value": sum(tasks) / len(tasks), "stderr": None}
