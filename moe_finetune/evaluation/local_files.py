"""The splits that a suite's line reads, and their files in the data folder."""

from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.suites import Suite, SuiteTask

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


def shots_of(entry: SuiteTask, config: dict[str, Any]) -> int:
    """Number of few-shot examples: the suite's, else the task's."""
    return entry.shots if entry.shots is not None else config.get("num_fewshot") or 0


def splits_of(entry: SuiteTask, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the tested split, and the split that examples are drawn from."""
    tested = config.get("test_split") or config.get("validation_split")
    if not shots_of(entry, config) or (config.get("fewshot_config") or {}).get("samples"):
        return tested, None
    keys = ("fewshot_split", "training_split", "validation_split")
    return tested, next((config[key] for key in keys if config.get(key)), tested)


def local_file(
    suite: Suite, entry: SuiteTask, config: dict[str, Any], split: str, data_dir: Path | None
) -> Path | None:
    """Path of a split's local file, which may not exist; None if the data comes from the hub.

    Args:
        config: the task's YAML.
        data_dir: folder of local data, if any.
    """
    if named := entry.files.get(split):
        for folder in (data_dir, suite.folder):
            if folder is not None and (folder / named).is_file():
                return folder / named
        if data_dir is None and not entry.template:
            return None
        return (data_dir or suite.folder or Path()) / named
    if data_dir is None:
        if entry.template:
            raise EvaluationError(
                f"suite {suite.name}: task '{entry.task}' needs files: {{{split}: ...}}"
            )
        return None
    folder = data_dir / str(config.get("dataset_path", config["task"]))
    if config.get("dataset_name"):
        folder /= str(config["dataset_name"])
    for suffix in _SUFFIXES:
        if (folder / f"{split}{suffix}").is_file():
            return folder / f"{split}{suffix}"
    return folder / f"{split}.jsonl"
