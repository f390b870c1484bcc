"""Check which tasks of a suite can run here, what is missing, and estimate their cost."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError, MoeFinetuneError
from moe_finetune.evaluation.sandbox.install import no_sandbox
from moe_finetune.evaluation.suite_lines import Line, data_folder
from moe_finetune.evaluation.suites import Suite, load_suite
from moe_finetune.io.counted import counted
from moe_finetune.models.tokenizer import Tokenizer

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
    tokenizer: Tokenizer | None = None,
    limit: int | None = None,
    allow_unsafe_local: bool = False,
) -> list[TaskCheck]:
    """Report which tasks can run and what is missing, and estimate tokens, without a model.

    Without ``data_dir`` rows come from the hub, and without a ``tokenizer`` four characters count
    as a token.
    """
    loaded = load_suite(suite)
    folder = data_folder(data_dir)
    checks = []
    for entry in loaded.tasks:
        check = TaskCheck(entry.label, runnable=True)
        checks.append(check)
        try:
            line = Line(loaded, entry, folder, limit)
            check.missing = sorted({str(path) for leaf in line.leaves for path in leaf.missing})
            check.runnable = not check.missing
            if check.runnable:
                line.check()
                line.rehearse()
                line.check_tokenizer(tokenizer)
                if all(leaf.files for leaf in line.leaves):
                    with line.blamed():
                        for task in line.load()["tasks"].values():
                            _estimate(check, task, line.limit, tokenizer)
            if entry.code and not allow_unsafe_local:
                check.problem = no_sandbox()
                check.runnable = check.runnable and not check.problem
        except MoeFinetuneError as error:
            check.runnable, check.problem = False, str(error)
    return checks


def _estimate(check: TaskCheck, task: Any, limit: int | None, tokenizer: Tokenizer | None) -> None:
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
                f"{counted(check.items, 'item')}, {counted(check.requests or 0, 'request')}, about "
                f"{counted(check.prompt_tokens or 0, 'prompt token')}, "
                f"at most {check.reply_tokens:,} replied"
            )
        elif check.runnable:
            size = "from the hub"
        detail = size if check.runnable else check.problem
        lines.append(f"{check.label:{width}}  {state:10}  {detail}".rstrip())
        lines += [f"{'':{width}}  missing: {path}" for path in check.missing[:3]]
        if len(check.missing) > 3:
            lines.append(f"{'':{width}}  ... and {len(check.missing) - 3} more files")
    return "\n".join(lines)
