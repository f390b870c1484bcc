"""Verdicts of the rules, a judge model and people, and Cohen's kappa of each pair."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, EvaluationError
from moe_finetune.evaluation import human
from moe_finetune.evaluation.validations import AnsweredTask, Verdicts
from moe_finetune.io.rows import read_rows
from moe_finetune.io.tables import aligned
from moe_finetune.metrics.statistics import cohens_kappa


def agreement(
    validations: Mapping[str, Mapping[Any, bool]],
) -> dict[str, dict[str, float | int]]:
    """Return kappa and raw agreement of each pair of validations over their common items.

    Args:
        validations: name ("rules", "judge", "people") -> item -> correct.

    Raises:
        EvaluationError: a pair without an item in common.
    """
    result: dict[str, dict[str, float | int]] = {}
    for (first, a), (second, b) in itertools.combinations(validations.items(), 2):
        common = [item for item in a if item in b]
        if not common:
            raise EvaluationError(f"{first} and {second} have no judged item in common")
        verdicts_a, verdicts_b = [a[i] for i in common], [b[i] for i in common]
        result[f"{first} ~ {second}"] = {
            "kappa": cohens_kappa(verdicts_a, verdicts_b),
            "agreement": sum(x == y for x, y in zip(verdicts_a, verdicts_b, strict=True))
            / len(common),
            "n": len(common),
        }
    return result


def rule_verdicts(task: AnsweredTask) -> Verdicts:
    """Verdicts of the rules that score the task; none if it is not scored yet."""
    metric, filter = task.result["metric"], task.result["filter"]
    if metric not in task.rows[0]["metrics"]:
        return {}
    filters = {row["filter"] for row in task.rows}
    if filter not in filters:
        # Programs are scored after generation, under the only filter of their samples.
        (filter,) = filters
    rows = [row for row in task.rows if row["filter"] == filter]
    for row in rows:
        if metric not in row["metrics"]:
            raise DataError(
                f"{task.folder}, task {task.label}: item {row['doc_id']} has no metric '{metric}'"
            )
    return {(task.method, r["task"], r["doc_id"]): r["metrics"][metric] == 1 for r in rows}


def judge_verdicts(task: AnsweredTask) -> Verdicts:
    """Verdicts of the judge in the task's ``.judged.jsonl``; none without the file."""
    if not task.judged.is_file():
        return {}
    rows = read_rows(task.judged, ("task", "doc_id", "judge"))
    for row in rows:
        if not isinstance(row["judge"], dict) or type(row["judge"].get("correct")) is not bool:
            raise DataError(f"{task.judged}: item {row['doc_id']} has no verdict; judge again")
    return {(task.method, row["task"], row["doc_id"]): row["judge"]["correct"] for row in rows}


def agreement_table(
    tasks: Sequence[AnsweredTask], annotations: Sequence[Path] = (), key: Path | None = None
) -> str:
    """Return a table of the share that rules, judge and people accept, and each pair's kappa.

    Args:
        tasks: see :func:`generation_tasks`; a judge's verdicts are included where they exist.
        annotations: filled sheets, one file per annotator.
        key: the key that was written with the sheets.

    Raises:
        DataError: a damaged sheet or key.
        EvaluationError: two validations without an item in common.
    """
    validations: dict[str, Verdicts] = {"rules": {}, "judge": {}}
    for task in tasks:
        validations["rules"] |= rule_verdicts(task)
        validations["judge"] |= judge_verdicts(task)
    for file in annotations:
        assert key is not None
        name = "people" if len(annotations) == 1 else file.stem
        if name in validations:
            raise DataError(f"{file}: another annotator has the name '{name}'; rename the file")
        validations[name] = human.import_annotations(file, key)
        if not validations[name]:
            raise DataError(f"{file}: no row has a verdict; fill in 'correct' or 'incorrect'")
    validations = {name: verdicts for name, verdicts in validations.items() if verdicts}
    methods = list(dict.fromkeys(task.method for task in tasks))
    rows = [["accepted by", *methods]]
    for name, verdicts in validations.items():
        rows.append([name, *(_share(verdicts, method) for method in methods)])
    if len(validations) < 2:
        return aligned(rows, "left")
    pairs = [["agreement", "kappa", "equal", "items"]]
    for pair, measured in agreement(validations).items():
        pairs.append(
            [pair, f"{measured['kappa']:.3f}", f"{measured['agreement']:.3f}", f"{measured['n']}"]
        )
    return "\n\n".join(aligned(table, "left") for table in (rows, pairs))


def _share(verdicts: Verdicts, method: str) -> str:
    values = [correct for (owner, _, _), correct in verdicts.items() if owner == method]
    return f"{sum(values)} of {len(values)}"
