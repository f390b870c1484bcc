"""Evaluate a checkpoint on a suite, with resumable and comparable results."""

import datetime
import importlib.metadata
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moe_finetune.errors import EvaluationError, OutputExistsError
from moe_finetune.evaluation.backends import Backend, open_backend
from moe_finetune.evaluation.cache import ReplyStore
from moe_finetune.evaluation.collect import sample_rows, task_result
from moe_finetune.evaluation.offline import check_chats, of_lm_eval, prepare
from moe_finetune.evaluation.results import SCHEMA, Results, TaskResult
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.evaluation.sandbox.install import no_sandbox
from moe_finetune.evaluation.suites import Suite, SuiteTask, load_suite, select
from moe_finetune.evaluation.tasks import Catalog, Leaf
from moe_finetune.io import clear_beside, clear_leftovers, one_writer, write_atomic
from moe_finetune.io.environment import describe_environment
from moe_finetune.io.hashes import sha256_json, to_json
from moe_finetune.io.json_file import read_object
from moe_finetune.io.rows import write_jsonl
from moe_finetune.io.run_folder import RESULTS_FILE
from moe_finetune.io.terminal import terminal


@one_writer
def evaluate(
    checkpoint: str | Path,
    suite: str | Path | Suite,
    backend: str | None = None,
    output: str | Path = "eval",
    data_dir: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    overflow: str = "error",
    allow_unsafe_local: bool = False,
    only: Sequence[str] | None = None,
    opened: Backend | None = None,
    progress: bool = True,
    **engine: Any,
) -> Results:
    """Evaluate ``checkpoint`` on ``suite``, write ``<output>/results.json`` and return its content.

    Called again with the same arguments, a killed run resumes: finished tasks are read back, and
    stored replies of an unfinished task are not requested again. Results are keyed by checkpoint
    content, task definition, data and settings, so that none is reused for another checkpoint.

    Args:
        checkpoint: folder of an ordinary checkpoint (for a server: also the tokenizer's folder).
        output: folder for results.json, ``tasks/`` (samples) and ``cache/`` (replies).
        data_dir: folder of local data; nothing is downloaded then.
        limit: first items of each task only.
        seed: seed of few-shot sampling, of bootstraps and of the engine.
        overflow: ``"error"`` or ``"truncate"``, for prompts longer than the context.
        only: labels of the suite's tasks to run; default: all.
        opened: an open backend to use, which stays open.
        engine: further arguments of :func:`~moe_finetune.evaluation.backends.open_backend`.
    """
    loaded = load_suite(suite)
    if only is not None:
        loaded = select(loaded, only)
    output = Path(output)
    if data_dir is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    catalog, leaves = prepare(loaded, data_dir)
    sandbox, trouble = None, ""
    if programs := [t.label for t in loaded.tasks if t.code]:
        trouble = "" if allow_unsafe_local else no_sandbox()
        if trouble:
            terminal().say(f"{', '.join(programs)}: generated and not scored; {trouble}", "warning")
        else:
            sandbox = Sandbox(allow_unsafe_local=allow_unsafe_local)
    active = opened or open_backend(checkpoint, backend, seed=seed, **engine)
    settings = active.settings | {"overflow": overflow, "seed": seed}
    _refuse_other_checkpoint(output, active)
    clear_beside(output / RESULTS_FILE)
    for folder in ("cache", "tasks"):
        clear_leftovers(output / folder)
    run = _Run(
        loaded, catalog, active, settings, output, limit, seed, overflow, progress, sandbox, trouble
    )
    try:
        check_chats(loaded, loaded.tasks, getattr(active.lm, "tokenizer", None))
        return run.go(leaves)
    finally:
        if opened is None:
            active.close()


def definition_of(entry: SuiteTask, leaves: list[Leaf], limit: int | None) -> dict[str, Any]:
    """What decides the requests and the score of a suite's line, apart from the model."""
    return {
        "entry": entry.model_dump(exclude={"label", "source", "chance", "files"}),
        "leaves": {leaf.name: leaf.config_hash() for leaf in leaves},
        "data": {leaf.name: leaf.data_hashes() for leaf in leaves},
        "limit": min((n for n in (limit, entry.limit) if n is not None), default=None),
        "package": importlib.metadata.version("moe-finetune"),
    }


def definitions(
    suite: Suite, data_dir: str | Path | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """:func:`definition_of` every line of ``suite``, by label."""
    if data_dir is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _, leaves = prepare(suite, data_dir, rehearsed=True)
    return {entry.label: definition_of(entry, leaves[entry.label], limit) for entry in suite.tasks}


def _refuse_other_checkpoint(output: Path, backend: Backend) -> None:
    path = output / RESULTS_FILE
    if not path.is_file():
        return
    results = read_object(path, OutputExistsError, "choose another output folder", finite=False)
    checkpoint = results.get("checkpoint")
    checkpoint = checkpoint.get("sha256") if isinstance(checkpoint, dict) else None
    if checkpoint != backend.identity:
        raise OutputExistsError(
            f"{path} contains results of another checkpoint; choose another output folder"
        )


@dataclass
class _Run:
    """One call of :func:`evaluate`, after all checks, with an open backend."""

    suite: Suite
    catalog: Catalog
    backend: Backend
    settings: dict[str, Any]
    output: Path
    limit: int | None
    seed: int
    overflow: str
    progress: bool
    sandbox: Sandbox | None
    trouble: str

    def __post_init__(self) -> None:
        self.identity = {"checkpoint": self.backend.identity, "settings": self.settings}
        self.key = f"{self.backend.identity[:12]}-{sha256_json(self.settings)[:12]}"
        self.started = time.time()

    def go(self, leaves: dict[str, list[Leaf]]) -> Results:
        tasks: dict[str, TaskResult] = {}
        notes = list(self.backend.notes)
        try:
            for index, entry in enumerate(self.suite.tasks, 1):
                self._say(f"[{index}/{len(self.suite.tasks)}] {entry.label}")
                result = self._task(entry, leaves[entry.label])
                tasks[entry.label] = result
                for note in result["notes"]:
                    self._say(f"  {note}")
        except BaseException:
            self._write(tasks, notes, complete=False)
            raise
        return self._write(tasks, notes, complete=True)

    def _say(self, line: str) -> None:
        if self.progress:
            terminal().say(line)

    def _task_file(self, key: str, entry: SuiteTask) -> Path:
        return self.output / "tasks" / f"{entry.label}-{key[:16]}" / "result.json"

    def _task(self, entry: SuiteTask, leaves: list[Leaf]) -> TaskResult:
        definition = definition_of(entry, leaves, self.limit)
        limit = definition["limit"]
        key = sha256_json([definition, self.identity])
        file = self._task_file(key, entry)
        if file.is_file():
            stored = cast(TaskResult, read_object(file, EvaluationError, "delete it", finite=False))
            if stored["value"] is not None or self.sandbox is None:
                return stored
        started = time.perf_counter()
        raw, usage = self._ask(entry, leaves, limit)
        samples = sample_rows(raw["samples"])
        write_jsonl(file.parent / "samples.jsonl", samples)
        result = task_result(entry, leaves, raw)
        result |= {
            "key": key,
            "config_sha256": sha256_json(definition["leaves"]),
            "data_sha256": {leaf.name: leaf.data_hashes() for leaf in leaves},
            "samples": str((file.parent / "samples.jsonl").relative_to(self.output)),
            "usage": usage,
            "wall_seconds": time.perf_counter() - started,
        }
        if entry.code and self.trouble:
            result["notes"] = [f"generated, not scored: {self.trouble}"]
        elif entry.code and self.sandbox is not None and self.sandbox.kind == "unsafe-local":
            result["notes"].append("programs ran without a sandbox")
        if usage["overflowing"]:
            result["notes"].append(
                f"{usage['overflowing']} of {usage['requests']} prompts were longer than the "
                "context and were truncated on the left"
            )
        if usage["thoughts"]:
            result["notes"].append(f"the thoughts of {usage['thoughts']} replies are not judged")
        if usage["unanswered"]:
            result["notes"].append(
                f"{usage['unanswered']} replies end inside their thoughts and count as no answer; "
                "raise the line's max_tokens"
            )
        write_atomic(file, to_json(result, 1, sort=False))
        return result

    def _ask(
        self, entry: SuiteTask, leaves: list[Leaf], limit: int | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        import lm_eval
        from transformers import set_seed

        from moe_finetune.evaluation.cached_lm import CachedLM, Overflow
        from moe_finetune.evaluation.code import Run, scored_by, unscored

        store = ReplyStore(self.output / "cache" / self.key / "replies.sqlite", self.identity)
        overflow = cast(Overflow, self.overflow)
        lm = CachedLM(self.backend, store, overflow, entry, self.progress)
        set_seed(self.seed)
        run: Run = unscored if self.sandbox is None else self.sandbox.run_all
        try:
            # `simple_evaluate` would also run git and pip for a record that is not used.
            with of_lm_eval(self.suite, entry), scored_by(run):
                raw = lm_eval.evaluate(
                    lm=lm,
                    task_dict=self.catalog.load(entry, leaves, self.seed),
                    limit=limit,
                    bootstrap_iters=1000,
                    apply_chat_template=entry.chat,
                    fewshot_as_multiturn=entry.chat,
                )
        finally:
            store.close()
        return cast(dict[str, Any], raw), lm.usage.as_dict()

    def _write(self, tasks: dict[str, TaskResult], notes: list[str], complete: bool) -> Results:
        results: Results = {
            "schema": SCHEMA,
            "complete": complete,
            "suite": {
                "name": self.suite.name,
                "sha256": sha256_json(self.suite.model_dump(mode="json")),
                "external": self.suite.external,
            },
            "checkpoint": {"path": self.backend.checkpoint, "sha256": self.backend.identity},
            "backend": self.backend.kind,
            "settings": self.settings | {"limit": self.limit},
            "environment": describe_environment(),
            "tasks": tasks,
            "unfinished": [t.label for t in self.suite.tasks if t.label not in tasks],
            "notes": notes,
            "started": datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(
                timespec="seconds"
            ),
            "wall_seconds": time.time() - self.started,
        }
        write_atomic(self.output / RESULTS_FILE, to_json(results, 1, sort=False) + "\n")
        return results
