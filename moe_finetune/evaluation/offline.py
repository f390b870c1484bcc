"""Check which tasks of a suite can run here, what is missing, and estimate their cost."""

import io
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.data.chat import limited
from moe_finetune.errors import EvaluationError, MoeFinetuneError
from moe_finetune.evaluation.code import failed, scored_by
from moe_finetune.evaluation.collect import task_result
from moe_finetune.evaluation.sandbox.install import no_sandbox
from moe_finetune.evaluation.suites import Suite, SuiteTask, load_suite
from moe_finetune.evaluation.tasks import Catalog, Leaf

_SAMPLED = 50


@dataclass
class TaskCheck:
    """What :func:`check_suite` found for a line: ``problem`` says why it cannot run.

    ``items`` is None without local data. ``prompt_tokens`` are estimated from the first items,
    ``reply_tokens`` an upper bound, with all replies at maximum length.
    """

    label: str
    runnable: bool
    missing: list[str] = field(default_factory=list)
    problem: str = ""
    items: int | None = None
    requests: int | None = None
    prompt_tokens: int | None = None
    reply_tokens: int | None = None


def check_suite(
    suite: str | Path | Suite,
    data_dir: str | Path | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
    allow_unsafe_local: bool = False,
) -> list[TaskCheck]:
    """Report which tasks can run and what is missing, and estimate tokens, without a model.

    Without ``data_dir`` rows come from the hub, and without a ``tokenizer`` four characters count
    as a token.
    """
    loaded = load_suite(suite)
    catalog = Catalog(loaded, data_dir)
    checks = []
    for entry in loaded.tasks:
        check = TaskCheck(entry.label, runnable=True)
        checks.append(check)
        try:
            leaves = catalog.leaves(entry)
            check.missing = sorted({str(path) for leaf in leaves for path in leaf.missing})
            check.runnable = not check.missing
            if check.runnable:
                catalog.check(entry, leaves)
                rehearse(catalog, entry, leaves)
                if tokenizer is not None:
                    check_chats(loaded, [entry], tokenizer)
            if check.runnable and all(leaf.files for leaf in leaves):
                cap = min((n for n in (limit, entry.limit) if n is not None), default=None)
                with of_lm_eval(loaded, entry):
                    for task in catalog.load(entry, leaves)["tasks"].values():
                        _estimate(check, task, cap, tokenizer)
            if entry.code and not allow_unsafe_local:
                check.problem = no_sandbox()
                check.runnable = check.runnable and not check.problem
        except MoeFinetuneError as error:
            check.runnable, check.problem = False, str(error)
    return checks


def prepare(
    suite: Suite, data_dir: str | Path | None, rehearsed: bool = False
) -> tuple[Catalog, dict[str, list[Leaf]]]:
    """Find the tasks of ``suite`` and check them, without a model; the tasks of each line by
    label.
    """
    catalog = Catalog(suite, data_dir)
    leaves = {entry.label: catalog.leaves(entry) for entry in suite.tasks}
    for entry in suite.tasks:
        catalog.check(entry, leaves[entry.label])
    for entry in () if rehearsed else suite.tasks:
        rehearse(catalog, entry, leaves[entry.label])
    return catalog, leaves


def rehearse(catalog: Catalog, entry: SuiteTask, leaves: list[Leaf]) -> None:
    """Ask lm-eval for the first item of each task, with a model that answers nonsense: what it does
    not accept, and a metric that it does not report, are found here.
    """
    import lm_eval
    from lm_eval.models.dummy import DummyLM

    class Nobody(DummyLM):
        tokenizer_name = "nobody"

        def apply_chat_template(self, chat_history: Any, *_: Any, **__: Any) -> str:
            return "\n".join(turn["content"] for turn in chat_history)

    noise, drawn = io.StringIO(), random.getstate()
    try:
        with (
            of_lm_eval(catalog.suite, entry),
            redirect_stdout(noise),
            redirect_stderr(noise),
            scored_by(failed),
        ):
            tasks = catalog.load(entry, leaves)
            for task in tasks["tasks"].values():
                _check_labels(catalog.suite, entry, task, leaves)
            raw = lm_eval.evaluate(
                lm=Nobody(),
                task_dict=tasks,
                limit=1,
                bootstrap_iters=0,
                apply_chat_template=entry.chat,
                fewshot_as_multiturn=entry.chat,
            )
    finally:
        random.setstate(drawn)  # the model's nonsense is drawn
    reported = task_result(entry, leaves, raw)["metrics"]
    if f"{entry.metric},{entry.filter}" not in reported:
        names = "; ".join(score.replace(",", " with filter ") for score in sorted(reported))
        what = f"it reports {names}" if names else (
            "it is a group without a score; list its tasks separately"
        )  # fmt: skip
        raise EvaluationError(
            f"{_place(catalog.suite, entry)} reports no metric '{entry.metric}' with filter "
            f"'{entry.filter}'; {what}"
        )


def _place(suite: Suite, entry: SuiteTask) -> str:
    return f"suite {suite.name}: task '{entry.label}'"


@contextmanager
def of_lm_eval(suite: Suite, entry: SuiteTask) -> Iterator[None]:
    """Say which line a task's error belongs to; what a model raises passes as it is."""
    try:
        yield
    except MoeFinetuneError:
        raise
    except Exception as error:  # a task may run anything
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename.endswith("cached_lm.py") for frame in frames):
            raise
        raise EvaluationError(
            f"{_place(suite, entry)}: lm-eval cannot ask it ({type(error).__name__}: {error}); "
            "correct its rows, or the file that defines it"
        ) from error


def _check_labels(suite: Suite, entry: SuiteTask, task: Any, leaves: list[Leaf]) -> None:
    """Find the first local item whose label is no choice; lm-eval would score it 0."""
    files = {leaf.name: leaf.files.get(leaf.tested or "") for leaf in leaves}
    path = files.get(task.config.task)
    if path is None or task.OUTPUT_TYPE != "multiple_choice":
        return
    for item, doc in enumerate(task.eval_docs, 1):
        label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        choices = task.doc_to_choice(doc)
        for answer in label if isinstance(label, list) else [label]:
            if answer not in (range(len(choices)) if isinstance(answer, int) else choices):
                hint = "; CSV has no numbers, so use .jsonl" if ".csv" in path.suffixes else ""
                raise EvaluationError(
                    f"{_place(suite, entry)}: item {item} of {path}: its answer {answer!r:.60} is "
                    f"none of its {len(choices)} choices, nor a number from 0 to "
                    f"{len(choices) - 1}{hint}"
                )


def check_chats(suite: Suite, tasks: list[SuiteTask], tokenizer: Any) -> None:
    """Refuse ``chat: true`` where ``tokenizer`` cannot render a chat."""
    chats = [entry for entry in tasks if entry.chat]
    if not chats or not hasattr(tokenizer, "apply_chat_template"):
        return
    try:
        with limited():
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except Exception as error:  # a template may raise anything
        raise EvaluationError(
            f"{_place(suite, chats[0])}: chat: true, but the checkpoint's tokenizer cannot render "
            f"a chat ({error}); set chat: false, or add the model's chat_template.jinja to it"
        ) from None


def _estimate(check: TaskCheck, task: Any, limit: int | None, tokenizer: Any) -> None:
    items = len(task.eval_docs)
    items = min(items, limit) if limit else items
    sampled = min(items, _SAMPLED)
    task.build_all_requests(limit=sampled, rank=0, world_size=1)
    requests = task.instances
    scale = items / sampled
    tokens = 0
    reply = 0
    for request in requests:
        generation = isinstance(request.args[1], dict) if len(request.args) > 1 else False
        text = request.args[0] if generation else "".join(request.args)
        tokens += len(tokenizer(text).input_ids) if tokenizer else len(text) // 4
        if generation:
            reply += int(request.args[1].get("max_gen_toks", 256))
    check.items = (check.items or 0) + items
    check.requests = (check.requests or 0) + round(len(requests) * scale)
    check.prompt_tokens = (check.prompt_tokens or 0) + round(tokens * scale)
    check.reply_tokens = (check.reply_tokens or 0) + round(reply * scale)


def render_checks(checks: list[TaskCheck]) -> str:
    """Return the checks as a table."""
    if not checks:
        raise EvaluationError("nothing to check")
    width = max(len(c.label) for c in checks)
    lines = []
    for check in checks:
        state = "ready" if check.runnable else "cannot run"
        size = ""
        if check.items is not None:
            size = (
                f"{check.items:,} items, {check.requests:,} requests, about "
                f"{check.prompt_tokens:,} prompt tokens, at most {check.reply_tokens:,} replied"
            )
        elif check.runnable:
            size = "from the hub"
        detail = size if check.runnable else check.problem
        lines.append(f"{check.label:{width}}  {state:10}  {detail}".rstrip())
        lines += [f"{'':{width}}  missing: {path}" for path in check.missing[:3]]
        if len(check.missing) > 3:
            lines.append(f"{'':{width}}  ... and {len(check.missing) - 3} more files")
    return "\n".join(lines)
