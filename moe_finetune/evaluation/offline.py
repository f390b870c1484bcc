"""Check which tasks of a suite can run here, what is missing, and estimate their cost."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError, MoeFinetuneError
from moe_finetune.evaluation.catalog import Catalog
from moe_finetune.evaluation.sandbox.install import no_sandbox
from moe_finetune.evaluation.suites import Suite, load_suite

_SAMPLED = 50


@dataclass
class TaskCheck:
    """The result of :func:`check_suite` for one line of a suite.

    Attributes:
        label: the line's key in results.json.
        runnable: whether the task can start (with a data folder: whether all files exist).
        problem: why it cannot run, apart from a missing file, or how to run it elsewhere.
        external: whether another package evaluates it.
        items: number of items; None when the data comes from the hub.
        requests: model requests (one per choice in multiple choice).
        prompt_tokens: estimate from the first items, characters / 4 without a tokenizer.
        reply_tokens: upper bound, with all replies at maximum length.
    """

    label: str
    runnable: bool
    missing: list[str] = field(default_factory=list)
    problem: str = ""
    external: bool = False
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

    Args:
        suite: name, file or :class:`Suite`.
        data_dir: folder of local data; without it tasks load from the hub and are not estimated.
        tokenizer: a tokenizer (``tokenizer(text).input_ids``) for the estimate.
        limit: first items of each task only.
        allow_unsafe_local: generated programs will be scored without a sandbox.
    """
    loaded = load_suite(suite)
    catalog = Catalog(loaded, data_dir)
    checks = []
    for entry in loaded.tasks:
        check = TaskCheck(entry.label, runnable=True)
        checks.append(check)
        if entry.external:
            check.runnable, check.problem, check.external = False, entry.external, True
            continue
        try:
            leaves = catalog.leaves(entry)
            check.missing = sorted({str(path) for leaf in leaves for path in leaf.missing})
            check.runnable = not check.missing
            if check.runnable:
                catalog.check(entry, leaves)
            if check.runnable and all(leaf.files for leaf in leaves):
                cap = min((n for n in (limit, entry.limit) if n is not None), default=None)
                for task in catalog.load(entry, leaves)["tasks"].values():
                    _estimate(check, task, cap, tokenizer)
            if entry.code and not allow_unsafe_local:
                check.problem = no_sandbox()
                check.runnable = check.runnable and not check.problem
        except MoeFinetuneError as error:
            check.runnable, check.problem = False, str(error)
    return checks


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
        state = "elsewhere" if check.external else "ready" if check.runnable else "cannot run"
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
