"""Validate finished results by a judge model and by people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, EvaluationError, OutputExistsError, did_you_mean
from moe_finetune.evaluation.comparison import result_names
from moe_finetune.evaluation.human import Sheets, export_sheets
from moe_finetune.evaluation.judge import DEFAULT_URL, INSTRUCTION, Judge
from moe_finetune.evaluation.results import TaskResult, load_results, samples_file
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.rows import read_rows, write_jsonl

FIELDS = ("task", "doc_id", "item", "doc", "target", "replies", "filter", "metrics")
Verdicts = dict[tuple[str, str, int], bool]
"""(method, task, doc_id) -> whether the answer is correct."""


@dataclass(frozen=True)
class AnsweredTask:
    """A task in one folder of results whose answers are text.

    Attributes:
        method: short name of the folder, as in comparisons.
        label: the task's label in results.json.
        rows: its samples, one for each item and answer extraction.
    """

    method: str
    folder: Path
    label: str
    result: TaskResult
    rows: list[dict[str, Any]]

    @property
    def judged(self) -> Path:
        """The file of a judge's verdicts next to the samples; it may not exist."""
        samples = samples_file(self.folder, self.result)
        return samples.with_name(f"{samples.stem}.judged.jsonl")

    def items(self) -> list[dict[str, Any]]:
        """The first row of each item."""
        first: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self.rows:
            first.setdefault((row["task"], row["doc_id"]), row)
        return list(first.values())

    def texts(self) -> list[tuple[str, str, str]]:
        """Question, reference and answer of each item."""
        return [item_texts(row) for row in self.items()]


def item_texts(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return question, reference and answer of a sample."""
    doc, replies = row["doc"], row["replies"]
    try:
        answer = replies[0][0]
    except (IndexError, KeyError, TypeError):
        answer = None
    if not isinstance(doc, dict) or not isinstance(answer, str):
        raise DataError(
            f"item {row['doc_id']} of task {row['task']}: doc is not an object, or replies have "
            "no text"
        )
    question = next((str(doc[n]) for n in ("question", "problem", "prompt") if n in doc), None)
    if question is None:
        raise EvaluationError(f"the item has no field 'question'; it has {', '.join(sorted(doc))}")
    return question, str(row["target"]), answer


def generation_tasks(folders: Sequence[Path], only: Sequence[str] = ()) -> list[AnsweredTask]:
    """Return the tasks whose answers are text, for every folder of results.

    Args:
        only: task labels; default: all.

    Raises:
        DataError: the samples were not written by an evaluation.
        EvaluationError: an unknown label, or no task with text answers.
    """
    tasks = []
    labels: set[str] = set()
    for method, folder in zip(result_names(folders), folders, strict=True):
        for label, result in load_results(folder)["tasks"].items():
            labels.add(label)
            if only and label not in only:
                continue
            file = samples_file(folder, result)
            rows = read_rows(file, FIELDS)
            try:
                is_text = isinstance(rows[0]["replies"][0][0], str)
            except (KeyError, IndexError, TypeError):
                raise DataError(f"{file}: replies of the first row have no answer") from None
            for row in rows:
                if not (isinstance(row["metrics"], dict) and isinstance(row["filter"], str)):
                    raise DataError(
                        f"{file}: item {row['doc_id']}: metrics must be an object and filter text"
                    )
            if is_text:
                tasks.append(AnsweredTask(method, folder, label, result, rows))
    for label in only:
        if label not in labels:
            raise EvaluationError(
                f"the results have no task '{label}'{did_you_mean(label, labels)}"
            )
    if not tasks:
        raise EvaluationError(
            "no task with written answers to judge; log-likelihood tasks only choose among "
            "given answers"
        )
    return tasks


def judge_tasks(
    tasks: Sequence[AnsweredTask], model: str, url: str | None = None, limit: int | None = None
) -> Iterator[str]:
    """Judge every task into its ``.judged.jsonl``; yield a line with the result and its tokens.

    Args:
        url: its endpoint; default: OpenAI's.
        limit: first items of each task only.

    Raises:
        EvaluationError: the judge failed; verdicts so far are stored in its cache.
    """
    url = url or DEFAULT_URL
    name = f"judge-{sha256_json([model, url, INSTRUCTION])[:12]}.sqlite"
    for task in tasks:
        with Judge(model, url, cache=task.folder / "cache" / name) as judge:
            verdicts = judge.judge_all(task.texts()[:limit])
        judged = [
            {**row, "judge": {"model": model, "correct": v.correct, "reason": v.reason}}
            for row, v in zip(task.items()[:limit], verdicts, strict=True)
        ]
        write_jsonl(task.judged, judged)
        accuracy = sum(verdict.correct for verdict in verdicts) / len(verdicts)
        yield (
            f"{task.method} {task.label}: judge {model} accepts {accuracy:.4f} of "
            f"{len(verdicts)}; {judge.requests} requests, {judge.prompt_tokens:,} tokens in, "
            f"{judge.completion_tokens:,} out"
        )


def write_sheets(tasks: Sequence[AnsweredTask], folder: Path, n: int) -> list[Sheets]:
    """Write blinded sheets, one for each task that all methods answered.

    Args:
        folder: gets a folder for each task.
        n: items of each task.

    Raises:
        OutputExistsError: sheets exist, and may contain annotations.
    """
    labels = list(dict.fromkeys(task.label for task in tasks))
    for label in labels:
        if (folder / label).exists():
            raise OutputExistsError(
                f"{folder / label} exists and may contain annotations; remove it or choose another "
                "--output"
            )
    return [
        export_sheets(
            {
                task.method: {
                    (row["task"], row["doc_id"], row["item"]): texts
                    for row, texts in zip(task.items(), task.texts(), strict=True)
                }
                for task in tasks
                if task.label == label
            },
            folder / label,
            n,
        )
        for label in labels
    ]
