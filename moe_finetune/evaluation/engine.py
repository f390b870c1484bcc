"""Evaluate a checkpoint on a suite, with resumable and comparable results."""

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moe_finetune.errors import EvaluationError, OutputExistsError
from moe_finetune.evaluation.backends import Backend, open_backend
from moe_finetune.evaluation.lm_eval_results import sample_rows, task_result
from moe_finetune.evaluation.reply_cache import ReplyStore
from moe_finetune.evaluation.results import SCHEMA, Results, TaskResult
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.evaluation.sandbox.install import no_sandbox
from moe_finetune.evaluation.suite_lines import Line, lines_of, ready_lines
from moe_finetune.evaluation.suites import Suite, load_suite, select
from moe_finetune.io import clear_beside, clear_leftovers, one_writer, write_atomic
from moe_finetune.io.environment import describe_environment
from moe_finetune.io.hashes import sha256_json, to_json
from moe_finetune.io.json_file import read_object
from moe_finetune.io.row_files import write_jsonl
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
    lines = ready_lines(loaded, data_dir, limit)
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
    try:
        for line in lines:
            line.check_tokenizer(getattr(active.lm, "tokenizer", None))
        run = _Run(
            suite=loaded,
            backend=active,
            settings=settings,
            output=output,
            limit=limit,
            progress=progress,
            sandbox=sandbox,
            trouble=trouble,
        )
        return run.go(lines)
    finally:
        if opened is None:
            active.close()


def definitions(
    suite: Suite, data_dir: str | Path | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """:meth:`Line.definition` of every line of ``suite``, checked, by label."""
    if data_dir is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    lines = list(lines_of(suite, data_dir, limit))
    for line in lines:
        line.check()
    return {line.entry.label: line.definition() for line in lines}


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
    backend: Backend
    settings: dict[str, Any]
    output: Path
    limit: int | None
    progress: bool
    sandbox: Sandbox | None
    trouble: str

    def __post_init__(self) -> None:
        self.identity = {"checkpoint": self.backend.identity, "settings": self.settings}
        self.key = f"{self.backend.identity[:12]}-{sha256_json(self.settings)[:12]}"
        self.started = time.time()

    def go(self, lines: list[Line]) -> Results:
        tasks: dict[str, TaskResult] = {}
        notes = list(self.backend.notes)
        try:
            for index, line in enumerate(lines, 1):
                label = line.entry.label
                self._say(f"[{index}/{len(lines)}] {label}")
                tasks[label] = result = self._task(line)
                for note in result["notes"]:
                    self._say(f"  {note}")
        except BaseException:
            self._write(tasks, notes, complete=False)
            raise
        return self._write(tasks, notes, complete=True)

    def _say(self, line: str) -> None:
        if self.progress:
            terminal().say(line)

    def _task(self, line: Line) -> TaskResult:
        entry, definition = line.entry, line.definition()
        key = sha256_json([definition, self.identity])
        file = self.output / "tasks" / f"{entry.label}-{key[:16]}" / "result.json"
        if file.is_file():
            stored = cast(TaskResult, read_object(file, EvaluationError, "delete it", finite=False))
            if stored["value"] is not None or self.sandbox is None:
                return stored
        started = time.perf_counter()
        raw, usage = self._ask(line)
        samples = sample_rows(raw["samples"])
        write_jsonl(file.parent / "samples.jsonl", samples)
        result = task_result(entry, line.leaves, raw)
        result |= {
            "key": key,
            "config_sha256": sha256_json(definition["leaves"]),
            "data_sha256": definition["data"],
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

    def _ask(self, line: Line) -> tuple[dict[str, Any], dict[str, Any]]:
        from transformers import set_seed

        from moe_finetune.evaluation.cached_lm import CachedLM
        from moe_finetune.evaluation.programs import Run, scored_by, unscored

        seed, overflow = self.settings["seed"], self.settings["overflow"]
        store = ReplyStore(self.output / "cache" / self.key / "replies.sqlite", self.identity)
        lm = CachedLM(self.backend, store, overflow, line.entry, self.progress)
        set_seed(seed)
        run: Run = unscored if self.sandbox is None else self.sandbox.run_all
        try:
            with scored_by(run):
                raw = line.ask(lm, line.limit, seed, resamples=1000)
        finally:
            store.close()
        return raw, lm.usage.as_dict()

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
