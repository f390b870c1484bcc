"""lm-evaluation-harness's tasks: the index of their names, and one of them with its local files."""

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, DependencyError, EvaluationError
from moe_finetune.io.hashes import sha256_file
from moe_finetune.io.hub import check_hub

REPLY_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of a reply's longest length in tokens in ``generation_kwargs``; the first one counts."""
_on_hub: set[tuple[Any, Any]] = set()


@dataclass(frozen=True)
class Leaf:
    """One lm-eval task of a line: its YAML, with includes and functions, and local files.

    ``files`` by split is empty where the rows are on the hub, and ``missing`` lists those that do
    not exist; ``tested`` and ``examples`` are the splits of items and of few-shot examples.
    """

    name: str
    config: dict[str, Any]
    files: dict[str, Path] = field(default_factory=dict)
    missing: tuple[Path, ...] = ()
    tested: str | None = None
    examples: str | None = None


@functools.cache
def indexed(folder: str, with_defaults: bool = False) -> tuple[Any, Mapping[str, Any]]:
    """lm-eval's TaskManager of the tasks in ``folder``, and its index before a line adds to it.

    ``with_defaults``: lm-eval's own tasks lie under those of the folder.
    """
    manager = _task_manager(include_path=folder, include_defaults=False)
    _check_names(folder, manager.task_index.values())
    if with_defaults:
        for name, entry in _defaults().items():
            manager.task_index.setdefault(name, entry)
    return manager, dict(manager.task_index)


@functools.cache  # it reads 14,000 files
def _defaults() -> Mapping[str, Any]:
    return _task_manager(include_defaults=True).task_index


def _task_manager(**options: Any) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DependencyError(
            f"lm-evaluation-harness cannot be imported ({error}); install moe-finetune[eval]"
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(**options)


def _check_names(folder: str, entries: Iterable[Any]) -> None:
    """Refuse two files of ``folder`` with one name; lm-eval takes the first without a word."""
    from lm_eval.tasks.manager import load_yaml

    chosen = {entry.name: entry.yaml_path for entry in entries}
    for path in sorted(Path(folder).rglob("*.yaml")):
        try:
            config = load_yaml(path, resolve_func=False)
        except Exception:  # no task's file; lm-eval leaves it out, too
            continue
        name = config.get("group") or config.get("task")
        first = chosen.get(name) if isinstance(name, str) else None
        if first is not None and not path.samefile(first):
            raise EvaluationError(
                f"{path}: its task '{name}' is in {first}, too; rename one of them"
            )


def require_hub(leaf: Leaf) -> None:
    """Check that a task's dataset is on the hub or in the cache, without fetching the rows."""
    from huggingface_hub import constants

    check_hub()
    path = leaf.config.get("dataset_path")
    name = leaf.config.get("dataset_name")
    # Offline, a single configuration may be missing; the hub has all or none.
    key = (path, name if constants.HF_HUB_OFFLINE else None)
    if path is None or key in _on_hub:
        return
    from datasets import load_dataset_builder

    options = dict(leaf.config.get("dataset_kwargs") or {})
    options.pop("trust_remote_code", None)
    try:
        load_dataset_builder(path, name, **options)
    except (OSError, ValueError) as error:  # what the hub's client and datasets raise
        raise DataError(
            f"task {leaf.name}: the hub dataset '{path}' is not available ({error}); "
            "download it where there is a network, or put its rows into a folder for "
            f"--data-dir ({path}/{name + '/' if name else ''}SPLIT.jsonl)"
        ) from None
    _on_hub.add(key)


def fields_of(template: Any) -> set[str]:
    """The fields that a task's ``doc_to_target`` writes as they are; none of a function's."""
    from jinja2 import Environment, meta

    if not isinstance(template, str) or "{%" in template:
        return set()
    names = meta.find_undeclared_variables(Environment().parse(template))
    return names or {template}


@functools.cache
def file_hash(path: Path, modified_ns: int) -> str:
    """SHA-256 of a file, read again when it changed."""
    return sha256_file(path)


def same_version(required: Any, installed: Any) -> bool:
    """Return whether two versions of a task are the same: 2 and 2.0 are."""
    try:
        return float(required) == float(installed)
    except (TypeError, ValueError):
        return str(required) == str(installed)
