"""The lm-evaluation-harness tasks of a suite's lines, and the data that they read.

With a data folder nothing is downloaded: every task's ``dataset_path`` and ``dataset_name`` name a
folder in it, ``<data>/<dataset_path>/<dataset_name>/<split>.jsonl`` (or .parquet, .csv, .json,
.jsonl.gz), unless the suite names files itself.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, DependencyError, EvaluationError, did_you_mean
from moe_finetune.evaluation.rows import load_rows
from moe_finetune.evaluation.suites import Suite, SuiteTask, eval_root
from moe_finetune.io.hashes import sha256_file, sha256_json
from moe_finetune.io.hub import check_hub

_SPLIT_KEYS = ("test_split", "validation_split", "fewshot_split", "training_split")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class Leaf:
    """One lm-eval task of a suite's line: its YAML, with includes and functions, and local files.

    ``files`` by split is empty where the rows are on the hub, and ``missing`` lists those that do
    not exist; ``tested`` and ``examples`` are the splits of items and of few-shot examples.
    """

    name: str
    config: dict[str, Any]
    files: dict[str, Path] = field(default_factory=dict)
    missing: tuple[Path, ...] = ()
    template: str | None = None
    tested: str | None = None
    examples: str | None = None

    def load(self) -> Any:
        """Return the local files as a ``datasets.DatasetDict``, all rows checked."""
        from datasets import DatasetDict

        return DatasetDict(
            {split: load_rows(path, self.template) for split, path in self.files.items()}
        )

    def data_hashes(self) -> dict[str, str]:
        """Return split -> SHA-256 of the local file."""
        return {
            split: _file_hash(path, path.stat().st_mtime_ns)
            for split, path in sorted(self.files.items())
        }

    def config_hash(self) -> str:
        """Return a hash of the task's definition, without the paths of its files."""
        hidden = ("custom_dataset", "dataset_kwargs", "metadata")
        return sha256_json({k: v for k, v in self.config.items() if k not in hidden})


@functools.cache
def _file_hash(path: Path, modified_ns: int) -> str:
    return sha256_file(path)


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
    """Path of a split's local file, which may not exist; None if the data comes from the hub."""
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


class Catalog:
    """The tasks that lm-eval and ``eval/tasks`` know.

    lm-eval's own 14,000 are indexed only when ``suite`` needs them; without ``data_dir``, tasks
    load from the hub.
    """

    def __init__(self, suite: Suite, data_dir: str | Path | None = None):
        self.suite = suite
        self._on_hub: set[tuple[Any, Any]] = set()
        self.data_dir = Path(data_dir) if data_dir is not None else None
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise DataError(f"data folder {self.data_dir} does not exist")
        folder = str(eval_root() / "tasks")
        self._manager, self._index = _indexed(folder, include_defaults=False)
        if not all(self._resolves(t.task) for t in suite.tasks if not t.template):
            self._manager, self._index = _indexed(folder, include_defaults=True)

    def _resolves(self, name: str) -> bool:
        try:
            return all(leaf in self._index for leaf in self._names(name))
        except EvaluationError:
            return False

    def leaves(self, entry: SuiteTask) -> list[Leaf]:
        """Return the lm-eval tasks of a line, with their local files."""
        name = entry.template or entry.task
        if name not in self._index:
            # Of lm-eval's 14,000 names, only those with the same first letters are candidates.
            candidates = [n for n in self._index if n[:2] == name[:2]] or list(self._index)[:20]
            raise EvaluationError(
                f"suite {self.suite.name}: unknown task '{name}'{did_you_mean(name, candidates)}"
            )
        indexed = self._index[name]
        installed = ((indexed.cfg or {}).get("metadata") or {}).get("version")
        if None not in (entry.version, installed) and not _same(entry.version, installed):
            raise EvaluationError(
                f"suite {self.suite.name}: task '{name}' has version {installed} here, but the "
                f"suite needs {entry.version}; their scores are not comparable. Install the "
                "lm-eval version of the constraints file, or change the suite"
            )
        return [self._leaf(entry, leaf) for leaf in self._names(name)]

    def check(self, entry: SuiteTask, leaves: list[Leaf]) -> None:
        """Check a line's files and rows, without a model."""
        for leaf in leaves:
            if leaf.missing:
                more = f" (and {len(leaf.missing) - 1} more)" if len(leaf.missing) > 1 else ""
                raise DataError(
                    f"task {leaf.name}: data file {leaf.missing[0]} does not exist{more}; give the "
                    "folder of its files as data_dir; 'eval --check' lists what a suite needs"
                )
        for leaf in leaves:
            if not leaf.files:
                self._require_hub(leaf)
            rows, shots = leaf.load(), shots_of(entry, leaf.config)
            if leaf.examples is not None and leaf.examples in rows:
                count = len(rows[leaf.examples])
                if count < shots + (leaf.examples == leaf.tested):
                    raise DataError(
                        f"{leaf.files[leaf.examples]}: {count} rows, too few for shots: {shots} of "
                        f"task '{leaf.name}'"
                    )

    def _require_hub(self, leaf: Leaf) -> None:
        """Check that a task's dataset is on the hub or in the cache, without fetching the rows."""
        from datasets import load_dataset_builder
        from huggingface_hub import constants

        check_hub()
        path, name = leaf.config.get("dataset_path"), leaf.config.get("dataset_name")
        # Offline, a single configuration may be missing; the hub has all or none.
        key = (path, name if constants.HF_HUB_OFFLINE else None)
        if path is None or key in self._on_hub:
            return
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
        self._on_hub.add(key)

    def _names(self, name: str, groups: tuple[str, ...] = ()) -> Iterator[str]:
        """The tasks of a name, which may be a tag's or, within ``groups``, a group's."""
        if name not in self._index or name in groups:
            what = "contains itself" if name in groups else f"names '{name}', which is no task"
            raise EvaluationError(
                f"suite {self.suite.name}: group '{groups[-1] if groups else name}' {what}; "
                "correct the file that defines it"
            )
        entry = self._index[name]
        if entry.kind.name == "TAG":
            yield from sorted(entry.tags)
        elif entry.kind.name == "GROUP":
            members: Any = (entry.cfg or {}).get("task") or []
            for member in members if isinstance(members, list) else [members]:
                yield from self._members(member, (*groups, name))
        else:
            yield name

    def _members(self, member: str | dict[str, Any], groups: tuple[str, ...]) -> Iterator[str]:
        """A group's member is a name, a task with overrides, or an inline group."""
        if isinstance(member, str):
            yield from self._names(member, groups)
        elif isinstance(member.get("task"), list):
            for child in member["task"]:
                yield from self._members(child, groups)
        else:
            yield from self._names(member.get("task") or member["group"], groups)

    def _leaf(self, entry: SuiteTask, name: str) -> Leaf:
        from lm_eval.tasks.manager import load_yaml

        indexed = self._index[name]
        config = (
            dict(load_yaml(indexed.yaml_path)) if indexed.yaml_path else dict(indexed.cfg or {})
        )
        if entry.template:
            config["task"] = entry.task
            if "train" in entry.files:
                config["training_split"] = config["fewshot_split"] = "train"
        tested, examples = splits_of(entry, config)
        splits = {config[key] for key in _SPLIT_KEYS if config.get(key)}
        if unknown := [split for split in entry.files if split not in splits]:
            raise EvaluationError(
                f"suite {self.suite.name}: task '{entry.task}' has no split '{unknown[0]}' under "
                f"files{did_you_mean(unknown[0], sorted(splits))}"
            )
        if entry.template and examples == tested:
            raise EvaluationError(
                f"suite {self.suite.name}: task '{entry.task}' has shots: {entry.shots} but only "
                "the tested rows to take them from; give others under files: {train: FILE}, "
                "or set shots: 0"
            )
        files: dict[str, Path] = {}
        missing = []
        for split in sorted({split for split in (tested, examples) if split}):
            path = local_file(self.suite, entry, config, split, self.data_dir)
            if path is None and files:
                raise EvaluationError(
                    f"suite {self.suite.name}: task '{entry.task}' has a local file for "
                    f"'{next(iter(files))}' and none for '{split}', where its examples come "
                    "from; give both under files, or set shots: 0"
                )
            if path is not None and path.is_file():
                files[split] = path
            elif path is not None:
                missing.append(path)
        return Leaf(config["task"], config, files, tuple(missing), entry.template, tested, examples)

    def load(self, entry: SuiteTask, leaves: list[Leaf], seed: int = 0) -> Any:
        """Return lm-eval's tasks of a line, which read local files if ``leaves`` have them."""
        tasks = self._manager.task_index
        for leaf in leaves:
            config = dict(leaf.config)
            if leaf.files:
                config["custom_dataset"] = lambda leaf=leaf, **_: leaf.load()
                config.pop("dataset_kwargs", None)
                for split_key in _SPLIT_KEYS:
                    # lm-eval opens every named split, even if no prompt needs it.
                    if config.get(split_key) not in (None, *leaf.files):
                        config[split_key] = None
            if "class" not in config:
                template = self._index[entry.template or leaf.name]
                tasks[leaf.name] = replace(template, name=leaf.name, yaml_path=None, cfg=config)
        loaded = self._manager.load([entry.task])
        for task in loaded["tasks"].values():
            if entry.shots is not None or task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", entry.shots or 0)
            task.set_fewshot_seed(seed=seed)
        return loaded


@functools.cache  # with its own tasks, lm-eval reads 14,000 files
def _indexed(folder: str, include_defaults: bool) -> tuple[Any, Mapping[str, Any]]:
    """lm-eval's TaskManager, and its index before a catalog added local files."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DependencyError(
            f"lm-evaluation-harness cannot be imported ({error}); install moe-finetune[eval]"
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=folder, include_defaults=include_defaults)
    return manager, dict(manager.task_index)


def _same(required: Any, installed: Any) -> bool:
    try:
        return float(required) == float(installed)
    except (TypeError, ValueError):
        return str(required) == str(installed)
