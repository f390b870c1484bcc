"""Validate finished results by a judge model and by people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_finetune.errors import DataError, EvaluationError, OutputExistsError, did_you_mean
from moe_finetune.evaluation.comparison import result_names
from moe_finetune.evaluation.human import Sheets, export_sheets
from moe_finetune.evaluation.judge import DEFAULT_URL, INSTRUCTION, Judge, judge_samples
from moe_finetune.evaluation.results import TaskResult, load_results, load_samples, samples_file
from moe_finetune.io.hashes import sha256_json


@dataclass(frozen=True)
class JudgedTask:
    """A generation task in one folder of results.

    Attributes:
        method: short name of the folder, as in comparisons.
        label: the task's label in results.json.
        metrics: metrics of its items.
        filters: answer extractions that its items were scored with.
    """

    method: str
    folder: Path
    label: str
    result: TaskResult
    metrics: tuple[str, ...]
    filters: tuple[str, ...]

    @property
    def samples(self) -> Path:
        return samples_file(self.folder, self.result)

    @property
    def judged(self) -> Path:
        """The file of a judge's verdicts next to the samples; it may not exist."""
        return self.samples.with_name(f"{self.samples.stem}.judged.jsonl")


def generation_tasks(folders: Sequence[Path], only: Sequence[str] = ()) -> list[JudgedTask]:
    """Return the tasks whose answers are text, for every folder of results.

    Args:
        only: labels to take; all unless given.

    Raises:
        EvaluationError: an unknown label, or no task of this kind.
    """
    tasks = []
    labels: set[str] = set()
    for method, folder in zip(result_names(folders), folders, strict=True):
        for label, result in load_results(folder)["tasks"].items():
            labels.add(label)
            if only and label not in only:
                continue
            rows = load_samples(folder, result)
            try:
                written = isinstance(rows[0]["replies"][0][0], str)
                filters = tuple(sorted({row["filter"] for row in rows}))
                metrics = tuple(rows[0]["metrics"])
            except (KeyError, IndexError, TypeError):
                raise DataError(
                    f"{samples_file(folder, result)}: not the samples of an evaluation; each row "
                    "has replies, metrics and a filter"
                ) from None
            if written:
                tasks.append(JudgedTask(method, folder, label, result, metrics, filters))
    for label in only:
        if label not in labels:
            raise EvaluationError(
                f"the results have no task '{label}'{did_you_mean(label, labels)}"
            )
    if not tasks:
        raise EvaluationError(
            "no task with written answers to judge; log-likelihood tasks choose among given ones"
        )
    return tasks


def judge_tasks(
    tasks: Sequence[JudgedTask], model: str, url: str | None = None, limit: int | None = None
) -> Iterator[str]:
    """Judge every task and yield a line with its result and the tokens that it took.

    Args:
        url: its endpoint; default: OpenAI's.
        limit: first items of each task only.
    """
    url = url or DEFAULT_URL
    name = f"judge-{sha256_json([model, url, INSTRUCTION])[:12]}.sqlite"
    for task in tasks:
        with Judge(model, url, cache=task.folder / "cache" / name) as judge:
            judged = judge_samples(task.samples, judge, limit=limit)
        yield (
            f"{task.method} {task.label}: judge {model} accepts {judged['accuracy']:.4f} of "
            f"{judged['n']}; {judged['requests']} requests, {judged['prompt_tokens']:,} tokens in, "
            f"{judged['completion_tokens']:,} out"
        )


def write_sheets(tasks: Sequence[JudgedTask], folder: Path, n: int) -> list[Sheets]:
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
            {task.method: task.samples for task in tasks if task.label == label},
            folder / label,
            n,
        )
        for label in labels
    ]
