"""Find the lm-evaluation-harness tasks of a suite's line, and the data that they read.

With a data folder nothing is downloaded: every task's ``dataset_path`` and ``dataset_name`` name a
folder in it, ``<data>/<dataset_path>/<dataset_name>/<split>.jsonl`` (or .parquet, .csv, .json,
.jsonl.gz), unless the suite names files itself.
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, DependencyError, EvaluationError, did_you_mean
from moe_finetune.evaluation.leaf import Leaf, require_files
from moe_finetune.evaluation.local_files import local_file, shots_of, splits_of
from moe_finetune.evaluation.suites import Suite, SuiteTask, eval_root
from moe_finetune.io.hub import check_hub

_SPLIT_KEYS = ("test_split", "validation_split", "fewshot_split", "training_split")


class Catalog:
    """The tasks that lm-eval and ``eval/tasks`` know.

    Args:
        suite: the suite to be run; lm-eval's own 14,000 tasks are indexed only when it needs them.
        data_dir: folder of local data, or None to let tasks load from the hub.

    """

    def __init__(self, suite: Suite, data_dir: str | Path | None = None):
        self.suite = suite
        self._on_hub: set[tuple[Any, Any]] = set()
        self.data_dir = Path(data_dir) if data_dir is not None else None
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise DataError(f"data folder {self.data_dir} does not exist")
        folder = str(eval_root() / "tasks")
        self._manager, self._index = _indexed(folder, include_defaults=False)
        if not all(self._resolves(t.task) for t in suite.tasks if not (t.external or t.template)):
            self._manager, self._index = _indexed(folder, include_defaults=True)

    def _resolves(self, name: str) -> bool:
        try:
            return all(leaf in self._index for leaf in self._names(name))
        except KeyError:
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

    def reports(self, entry: SuiteTask, leaves: list[Leaf]) -> set[str]:
        """Return the scores of a suite's line, each ``"metric,filter"``."""
        if entry.code:
            return {"pass@1,sandbox"}
        if entry.aggregate:
            every_accuracy = all("acc,none" in leaf.reports() for leaf in leaves)
            return {f"{entry.aggregate},none"} if every_accuracy else set()
        indexed = self._index[entry.template or entry.task]
        if indexed.kind.name not in ("GROUP", "TAG"):
            return leaves[0].reports()
        leaf_scores = set().union(*(leaf.reports() for leaf in leaves))
        scores = set()
        for listed in (indexed.cfg or {}).get("aggregate_metric_list") or []:
            chosen = listed.get("filter_list")
            chosen = [chosen] if isinstance(chosen, str) else chosen
            for score in leaf_scores:
                metric, _, name = score.rpartition(",")
                if metric == listed["metric"] and (chosen is None or name in chosen):
                    scores.add(score)
        return scores

    def check(self, entry: SuiteTask, leaves: list[Leaf]) -> None:
        """Check a line's metric, examples and rows, without a model."""
        if all("class" not in leaf.config for leaf in leaves):
            headline, reported = f"{entry.metric},{entry.filter}", self.reports(entry, leaves)
            if headline not in reported:
                names = sorted(score.replace(",", " with filter ") for score in reported)
                what = (
                    f"it reports {'; '.join(names)}"
                    if names
                    else ("it is a group without a score; list its tasks separately")
                )
                raise EvaluationError(
                    f"suite {self.suite.name}: task '{entry.label}' reports no metric "
                    f"'{entry.metric}' with filter '{entry.filter}'; {what}"
                )
        require_files(leaves)
        for leaf in leaves:
            if not leaf.files:
                self._require_hub(leaf)
            data = leaf.load()
            shots = shots_of(entry, leaf.config)
            if leaf.examples is not None and leaf.examples in data:
                rows = len(data[leaf.examples])
                if rows < shots + (leaf.examples == leaf.tested):
                    raise DataError(
                        f"{leaf.files[leaf.examples]}: {rows} rows, too few for shots: {shots} of "
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

    def _names(self, name: str) -> Iterator[str]:
        entry = self._index[name]
        if entry.kind.name == "TAG":
            yield from sorted(entry.tags)
        elif entry.kind.name == "GROUP":
            members: Any = (entry.cfg or {}).get("task") or []
            for member in members if isinstance(members, list) else [members]:
                yield from self._members(member)
        else:
            yield name

    def _members(self, member: str | dict[str, Any]) -> Iterator[str]:
        """A group's member is a name, a task with overrides, or an inline group."""
        if isinstance(member, str):
            yield from self._names(member)
        elif isinstance(member.get("task"), list):
            for child in member["task"]:
                yield from self._members(child)
        else:
            yield from self._names(member.get("task") or member["group"])

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


def prepare(suite: Suite, data_dir: str | Path | None) -> tuple[Catalog, dict[str, list[Leaf]]]:
    """Find the tasks of ``suite`` and check them, without a model.

    Returns:
        the catalog, and label -> tasks of each line that lm-eval evaluates.
    """
    catalog = Catalog(suite, data_dir)
    entries = [entry for entry in suite.tasks if not entry.external]
    leaves = {entry.label: catalog.leaves(entry) for entry in entries}
    for entry in entries:
        catalog.check(entry, leaves[entry.label])
    return catalog, leaves


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
