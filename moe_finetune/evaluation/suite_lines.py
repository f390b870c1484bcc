"""A suite's lines: the lm-evaluation-harness tasks of each, and the data that they read.

With a data folder nothing is downloaded: every task's ``dataset_path`` and ``dataset_name`` name a
folder in it, ``<data>/<dataset_path>/<dataset_name>/<split>.jsonl`` (or .parquet, .csv, .json,
.jsonl.gz), unless the suite names files itself.
"""

import importlib.metadata
import io
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_finetune.data.chat import limited
from moe_finetune.errors import DataError, EvaluationError, MoeFinetuneError, did_you_mean
from moe_finetune.evaluation.lm_eval_results import task_result
from moe_finetune.evaluation.lm_eval_tasks import (
    REPLY_LENGTHS,
    Leaf,
    fields_of,
    file_hash,
    indexed,
    require_hub,
    same_version,
)
from moe_finetune.evaluation.programs import failed, scored_by
from moe_finetune.evaluation.suite_rows import load_rows
from moe_finetune.evaluation.suites import Suite, SuiteTask, eval_root
from moe_finetune.io.hashes import sha256_json
from moe_finetune.models.tokenizer import Tokenizer

_SPLIT_KEYS = ("test_split", "validation_split", "fewshot_split", "training_split")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")
# What vLLM and servers take in generation_kwargs and transformers does not.
_OF_SERVERS = ("until", "seed", "presence_penalty", "frequency_penalty", "ignore_eos")


class Line:
    """A line of a suite, whose tasks are found and whose files are named.

    Attributes:
        entry: the line.
        limit: the first items that are asked, None for all.
        leaves: its lm-eval tasks.
    """

    def __init__(self, suite: Suite, entry: SuiteTask, data_dir: Path | None, limit: int | None):
        self.entry, self._folders = entry, (data_dir, suite.folder)
        self.limit = min((n for n in (limit, entry.limit) if n is not None), default=None)
        self._place = f"suite {suite.name}: task '{entry.label}'"
        self._name = entry.template or entry.task
        folder = str(eval_root() / "tasks")
        try:  # lm-eval's own 14,000 are indexed only where the line needs them
            self._manager, self._index = indexed(folder)
            names = list(self._names(self._name))
        except EvaluationError:
            self._manager, self._index = indexed(folder, with_defaults=True)
            if self._name not in self._index:
                # Only those with the same first letters are candidates.
                near = [name for name in self._index if name[:2] == self._name[:2]]
                near = near or list(self._index)[:20]
                raise self._error(
                    f"unknown task '{self._name}'{did_you_mean(self._name, near)}"
                ) from None
            names = list(self._names(self._name))
        metadata = (self._index[self._name].cfg or {}).get("metadata") or {}
        installed = metadata.get("version")
        if None not in (entry.version, installed) and not same_version(entry.version, installed):
            raise self._error(
                f"has version {installed} here, but the suite needs {entry.version}; their scores "
                "are not comparable. Install the lm-eval version of the constraints file, or "
                "change the suite"
            )
        self.leaves = [self._leaf(name) for name in names]

    def _error(self, problem: str) -> EvaluationError:
        return EvaluationError(f"{self._place}: {problem}")

    def _names(self, member: Any, groups: tuple[str, ...] = ()) -> Iterator[str]:
        """The tasks of a name, which may be a tag's or, within ``groups``, a group's.

        A group's member is a name, a task with overrides, or an inline group.
        """
        if isinstance(member, dict) and isinstance(member.get("task"), list):
            for child in member["task"]:
                yield from self._names(child, groups)
            return
        name = member if isinstance(member, str) else member.get("task") or member["group"]
        if name not in self._index or name in groups:
            what = "contains itself" if name in groups else f"names '{name}', which is no task"
            raise self._error(
                f"group '{groups[-1] if groups else name}' {what}; correct the file that defines it"
            )
        indexed_name = self._index[name]
        if indexed_name.kind.name == "TAG":
            yield from sorted(indexed_name.tags)
        elif indexed_name.kind.name == "GROUP":
            members: Any = (indexed_name.cfg or {}).get("task") or []
            for child in members if isinstance(members, list) else [members]:
                yield from self._names(child, (*groups, name))
        else:
            yield name

    def _leaf(self, name: str) -> Leaf:
        from lm_eval.tasks.manager import load_yaml

        entry, file = self.entry, self._index[name].yaml_path
        config = dict(load_yaml(file) if file else self._index[name].cfg or {})
        if entry.template:
            config["task"] = entry.task
            if "train" in entry.files:
                config["training_split"] = config["fewshot_split"] = "train"
        splits = {config[key] for key in _SPLIT_KEYS if config.get(key)}
        if unknown := [split for split in entry.files if split not in splits]:
            raise self._error(
                f"no split '{unknown[0]}' under files{did_you_mean(unknown[0], sorted(splits))}"
            )
        tested, examples = self._splits(config)
        if entry.template and examples == tested:
            raise self._error(
                f"has shots: {entry.shots} but only the tested rows to take them from; give others "
                "under files: {train: FILE}, or set shots: 0"
            )
        splits = {split for split in (tested, examples) if split}
        paths = {split: self._local(config, split) for split in sorted(splits)}
        local = {split: path for split, path in paths.items() if path is not None}
        if local and len(local) < len(paths):
            raise self._error(
                f"has a local file for '{next(iter(local))}' and none for "
                f"'{next(iter(paths.keys() - local))}', where its examples come from; give both "
                "under files, or set shots: 0"
            )
        files = {split: path for split, path in local.items() if path.is_file()}
        missing = tuple(path for split, path in local.items() if split not in files)
        return Leaf(
            name=config["task"],
            config=config,
            files=files,
            missing=missing,
            tested=tested,
            examples=examples,
        )

    def _splits(self, config: dict[str, Any]) -> tuple[str | None, str | None]:
        """The tested split of a task, and the one that its examples are drawn from."""
        tested = config.get("test_split") or config.get("validation_split")
        if not self._shots(config) or (config.get("fewshot_config") or {}).get("samples"):
            return tested, None
        keys = ("fewshot_split", "training_split", "validation_split")
        return tested, next((config[key] for key in keys if config.get(key)), tested)

    def _shots(self, config: dict[str, Any]) -> int:
        """Number of few-shot examples: the suite's, else the task's."""
        shots = self.entry.shots
        return shots if shots is not None else config.get("num_fewshot") or 0

    def _local(self, config: dict[str, Any], split: str) -> Path | None:
        """Path of a split's local file, which may not exist; None if the data are on the hub."""
        data_dir, suite_folder = self._folders
        if named := self.entry.files.get(split):
            for folder in (data_dir, suite_folder):
                if folder is not None and (folder / named).is_file():
                    return folder / named
            if data_dir is not None or self.entry.template:
                return (data_dir or suite_folder or Path()) / named
        elif self.entry.template and data_dir is None:
            raise self._error(f"needs files: {{{split}: ...}}")
        if data_dir is None:
            return None
        folder = data_dir / str(config.get("dataset_path", config["task"]))
        if config.get("dataset_name"):
            folder /= str(config["dataset_name"])
        files = [folder / f"{split}{suffix}" for suffix in _SUFFIXES]
        return next((file for file in files if file.is_file()), files[0])

    def rows(self, leaf: Leaf) -> Any:
        """The local files of a task as a ``datasets.DatasetDict``, all rows checked."""
        from datasets import DatasetDict

        return DatasetDict({s: load_rows(f, self.entry.template) for s, f in leaf.files.items()})

    def definition(self) -> dict[str, Any]:
        """What decides the requests and the scores, apart from the model."""
        hidden = ("custom_dataset", "dataset_kwargs", "metadata")  # among others, paths
        return {
            "entry": self.entry.model_dump(exclude={"label", "source", "chance", "files"}),
            "leaves": {
                leaf.name: sha256_json({k: v for k, v in leaf.config.items() if k not in hidden})
                for leaf in self.leaves
            },
            "data": {
                leaf.name: {
                    split: file_hash(path, path.stat().st_mtime_ns)
                    for split, path in sorted(leaf.files.items())
                }
                for leaf in self.leaves
            },
            "limit": self.limit,
            "package": importlib.metadata.version("moe-finetune"),
        }

    def check(self) -> None:
        """Check files and rows, without a model."""
        for leaf in self.leaves:
            if leaf.missing:
                more = f" (and {len(leaf.missing) - 1} more)" if len(leaf.missing) > 1 else ""
                raise DataError(
                    f"task {leaf.name}: data file {leaf.missing[0]} does not exist{more}; give the "
                    "folder of its files as data_dir; 'eval --check' lists what a suite needs"
                )
        for leaf in self.leaves:
            if not leaf.files:
                require_hub(leaf)
            rows, shots = self.rows(leaf), self._shots(leaf.config)
            if leaf.examples is not None and leaf.examples in rows:
                count = len(rows[leaf.examples])
                if count < shots + (leaf.examples == leaf.tested):
                    raise DataError(
                        f"{leaf.files[leaf.examples]}: {count} rows, too few for shots: {shots} of "
                        f"task '{leaf.name}'"
                    )

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Refuse a chat that ``tokenizer`` cannot render, and answers longer than a reply."""
        if tokenizer is None:
            return
        if self.entry.chat and hasattr(tokenizer, "apply_chat_template"):
            turns = [{"role": "user", "content": "?"}]
            try:
                with limited():
                    tokenizer.apply_chat_template(turns, tokenize=False)
            except Exception as error:  # a template may raise anything
                raise self._error(
                    f"chat: true, but the checkpoint's tokenizer cannot render a chat ({error}); "
                    "set chat: false, or add the model's chat_template.jinja to it"
                ) from None
        if self.entry.template == "local_exact_match" and callable(tokenizer):
            for leaf in self.leaves:
                self._check_lengths(leaf, tokenizer)

    def _check_lengths(self, leaf: Leaf, tokenizer: Tokenizer) -> None:
        limit = self.entry.max_tokens or leaf.config["generation_kwargs"]["max_gen_toks"]
        answers = [row["answer"].strip() for row in self.rows(leaf)[leaf.tested]]
        lengths = [len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"]]
        if long := [item for item, length in enumerate(lengths, 1) if length > limit]:
            raise self._error(
                f"item {long[0]} of {leaf.files[leaf.tested or '']}: its answer has "
                f"{lengths[long[0] - 1]} tokens, a reply at most {limit}, so {len(long)} of "
                f"{len(lengths)} answers can never be given; set max_tokens: {max(lengths)} on "
                "the suite's line"
            )

    def rehearse(self) -> None:
        """Ask for the first item of each task, with a model that answers nonsense: what lm-eval
        does not accept, and a metric that it does not report, are found here.
        """
        from lm_eval.models.dummy import DummyLM

        class Nobody(DummyLM):
            tokenizer_name = "nobody"

            def apply_chat_template(self, chat_history: Any, *_: Any, **__: Any) -> str:
                return "\n".join(turn["content"] for turn in chat_history)

        noise, drawn = io.StringIO(), random.getstate()
        try:
            with redirect_stdout(noise), redirect_stderr(noise), scored_by(failed):
                with self.blamed():
                    for task in self.load()["tasks"].values():
                        self._check_settings(task)
                        self._check_items(task)
                raw = self.ask(Nobody(), limit=1)
        finally:
            random.setstate(drawn)  # the model's nonsense is drawn
        reported = task_result(self.entry, self.leaves, raw)["metrics"]
        if f"{self.entry.metric},{self.entry.filter}" not in reported:
            names = "; ".join(score.replace(",", " with filter ") for score in sorted(reported))
            what = f"it reports {names}"
            if not names:
                what = "it is a group without a score; list its tasks separately"
            raise EvaluationError(
                f"{self._place} reports no metric '{self.entry.metric}' with filter "
                f"'{self.entry.filter}'; {what}"
            )

    def _check_settings(self, task: Any) -> None:
        """Refuse settings of the generation that no backend knows; some drop them silently."""
        from transformers import GenerationConfig

        supported = {*REPLY_LENGTHS, *_OF_SERVERS, *GenerationConfig().to_dict()}
        for key in task.config.generation_kwargs or {}:
            if key not in supported:
                raise self._error(
                    f"its generation_kwargs have '{key}', which no backend knows"
                    f"{did_you_mean(key, supported)}; correct the file that defines it"
                )

    def _check_items(self, task: Any) -> None:
        """Find the first local item that lm-eval would score 0: without an answer, or with a label
        that is no choice.
        """
        files = {leaf.name: leaf.files.get(leaf.tested or "") for leaf in self.leaves}
        path = files.get(task.config.task)
        if path is None:
            return
        if task.OUTPUT_TYPE == "multiple_choice":
            return self._check_labels(task, path)
        fields = fields_of(task.config.doc_to_target)
        for item, doc in enumerate(task.eval_docs, 1):
            if empty := [field for field in fields if field in doc and doc[field] is None]:
                raise self._error(f"item {item} of {path}: '{empty[0]}', its answer, is null")

    def _check_labels(self, task: Any, path: Path) -> None:
        for item, doc in enumerate(task.eval_docs, 1):
            label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
            choices = task.doc_to_choice(doc)
            for answer in label if isinstance(label, list) else [label]:
                if answer not in (range(len(choices)) if isinstance(answer, int) else choices):
                    hint = "; CSV has no numbers, so use .jsonl" if ".csv" in path.suffixes else ""
                    raise self._error(
                        f"item {item} of {path}: its answer {answer!r:.60} is none of its "
                        f"{len(choices)} choices, nor a number from 0 to {len(choices) - 1}{hint}"
                    )

    def load(self, seed: int = 0) -> Any:
        """lm-eval's tasks, which read local files where there are some."""
        for leaf in self.leaves:
            config = dict(leaf.config)
            if leaf.files:
                config["custom_dataset"] = lambda leaf=leaf, **_: self.rows(leaf)
                config.pop("dataset_kwargs", None)
                # lm-eval opens every named split, even if no prompt needs it.
                unread = [k for k in _SPLIT_KEYS if config.get(k) not in (None, *leaf.files)]
                config |= dict.fromkeys(unread)
            if "class" not in config:
                template = self._index[self.entry.template or leaf.name]
                self._manager.task_index[leaf.name] = replace(
                    template, name=leaf.name, yaml_path=None, cfg=config
                )
        loaded = self._manager.load([self.entry.task])
        for task in loaded["tasks"].values():
            if self.entry.shots is not None or task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", self.entry.shots or 0)
            task.set_fewshot_seed(seed=seed)
        return loaded

    def ask(self, lm: Any, limit: int | None, seed: int = 0, resamples: int = 0) -> dict[str, Any]:
        """What lm-eval returns when ``lm`` answers."""
        import lm_eval

        # `simple_evaluate` would also run git and pip for a record that is not used.
        with self.blamed():
            return lm_eval.evaluate(  # type: ignore[return-value]
                lm=lm,
                task_dict=self.load(seed),
                limit=limit,
                bootstrap_iters=resamples,
                apply_chat_template=self.entry.chat,
                fewshot_as_multiturn=self.entry.chat,
            )

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Say which line a task's error belongs to; what a model raises passes as it is."""
        try:
            yield
        except MoeFinetuneError:
            raise
        except Exception as error:  # a task may run anything
            frames = traceback.extract_tb(error.__traceback__)
            if any(frame.filename.endswith("cached_lm.py") for frame in frames):
                raise
            raise self._error(
                f"lm-eval cannot ask it ({type(error).__name__}: {error}); correct its rows, or "
                "the file that defines it"
            ) from error


def data_folder(data_dir: str | Path | None) -> Path | None:
    """The folder of a suite's files, which must exist; None for the hub's rows."""
    folder = Path(data_dir) if data_dir is not None else None
    if folder is not None and not folder.is_dir():
        raise DataError(f"data folder {folder} does not exist")
    return folder


def lines_of(
    suite: Suite, data_dir: str | Path | None = None, limit: int | None = None
) -> Iterator[Line]:
    """The lines of a suite; without ``data_dir`` their rows are on the hub."""
    folder = data_folder(data_dir)
    return (Line(suite, entry, folder, limit) for entry in suite.tasks)


def ready_lines(
    suite: Suite, data_dir: str | Path | None = None, limit: int | None = None
) -> list[Line]:
    """The lines of a suite, checked and rehearsed, without a model."""
    lines = list(lines_of(suite, data_dir, limit))
    for line in lines:
        line.check()
    for line in lines:
        line.rehearse()
    return lines
