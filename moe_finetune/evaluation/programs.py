"""Programs from replies, and their scores in a sandbox."""

import ast
import itertools
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, EvaluationError, did_you_mean
from moe_finetune.evaluation.judged_reply import judged
from moe_finetune.evaluation.sandbox import Program, Sandbox, Verdict
from moe_finetune.evaluation.sandbox.names import free_names, required_names
from moe_finetune.evaluation.statistics import mean_and_deviation
from moe_finetune.io.row_files import read_rows, write_jsonl

# A fence may follow a list's mark, whose width then indents the block, or words that lead to it.
_FENCE = re.compile(r"([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)([^`~\n]*?)(`{3,}|~{3,})[ \t]*([^`\n]*)")
_PYTHON = re.compile(r"(?:[{.\s]*(?:i?python|py)\d*\b.*)?", re.IGNORECASE)


def human_eval_program(doc: dict[str, Any], reply: str) -> Program:
    """Build the program of a HumanEval item: the reply continues the prompt, or is a whole block.

    Where the prompt opens a block, as in lm-eval's ``humaneval_instruct``, a fence ends the reply.
    ``doc`` has ``prompt``, ``test`` and ``entry_point``.
    """
    entry, reply = doc["entry_point"], judged(reply) or ""
    block, head = fenced(reply, (entry,)), reply.split("```")[0]
    if block is not None and _defines(block, entry):
        # The prompt first, for imports and helpers that the block omits.
        code = f"{doc['prompt']}    pass\n\n{block}"
    elif block is not None and not _is_body(head, doc["prompt"]):
        code = doc["prompt"] + block
    else:
        code = doc["prompt"] + (reply if block is None else head)
    tests = f"{doc['test']}\ncheck({entry})\n"
    return Program(code, tests, setup=doc["prompt"], entry=(entry,))


def mbpp_program(doc: dict[str, Any], reply: str) -> Program:
    """Build the program of an MBPP item, whose reply ends at ``[DONE]`` or a fence.

    ``doc`` has ``test_list``, and ``test_setup_code``, ``test_imports`` and ``code`` (the reference
    solution, for the names that it defines) if present.
    """
    imports = "\n".join(doc.get("test_imports") or [])
    # The set-up builds objects from the program's classes, so it runs with the tests.
    tests = "\n".join([doc.get("test_setup_code") or "", *doc["test_list"]])
    entry = required_names(tests, imports, doc.get("code") or "")
    reply = judged(reply) or ""
    code, text = fenced(reply, entry), reply.split("[DONE]")[0].split("```")[0]
    # Where the prompt opens the block, the reply's only fence ends it.
    if code is None or (_defines_all(text, entry) and not _defines_all(code, entry)):
        code = text
    # Modules that the tests use without an import come from Python, not from the program.
    modules = sorted((free_names(f"{imports}\n{tests}") & sys.stdlib_module_names) - set(entry))
    setup = "\n".join([imports, *(f"import {name}" for name in modules)])
    return Program(f"{imports}\n{code}", tests, setup, entry)


def fenced(reply: str, names: Sequence[str]) -> str | None:
    """Return the last fenced block of a reply that defines ``names``, else the longest; or None.

    Blocks of another language come last.
    """
    blocks = _blocks(reply)
    chosen = [code for language, code in blocks if _PYTHON.fullmatch(language)]
    others = [code for language, code in blocks if not _PYTHON.fullmatch(language)]
    for codes in (chosen, others):
        defining = [code for code in codes if _defines_all(code, names)]
        if defining:
            return textwrap.dedent(defining[-1])
    return max(chosen or others, key=len, default=None)


def _blocks(reply: str) -> list[tuple[str, str]]:
    """What the fences of a reply say of their blocks, and the blocks; the last may have no end.

    A block ends at a bare fence of its character that is as long, and not further in: those of a
    docstring's examples are.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    width = 0
    words = ""
    for line in reply.replace("\r\n", "\n").split("\n"):
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        opener = _FENCE.fullmatch(line)
        if fence and bare == fence[0] * max(len(bare), len(fence)) and indent <= width:
            fence = ""
        elif opener and (not fence or (words and opener[4])):
            mark, words, fence, language = opener.groups()
            # Words that end with a bare fence may speak of one.
            width, words = len(mark), "" if language else words
            blocks.append((language, []))
        elif fence:
            blocks[-1][1].append(line[min(indent, width) :])
    return [(language, "\n".join(lines)) for language, lines in blocks]


def _is_body(text: str, prompt: str) -> bool:
    """Whether ``text`` goes on with the function that ``prompt`` begins."""
    if not re.search(r"^[ \t]+[^\s#]", text, re.MULTILINE):
        return False
    try:
        ast.parse(prompt + text)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # of hostile nesting the last two
        return False
    return True


def _defines_all(code: str, names: Sequence[str]) -> bool:
    return bool(names) and all(_defines(code, name) for name in names)


def _defines(code: str, name: str) -> bool:
    pattern = rf"^\s*(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*[:=]"
    return re.search(pattern, code, re.MULTILINE) is not None


FORMS: dict[str, Callable[[dict[str, Any], str], Program]] = {
    "humaneval": human_eval_program,
    "mbpp": mbpp_program,
}


Run = Callable[[list[Program]], list[Verdict]]
_run: ContextVar[Run | None] = ContextVar("run", default=None)


@contextmanager
def scored_by(run: Run) -> Iterator[None]:
    """Let ``run`` give the verdicts of :func:`verdicts`."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def failed(programs: list[Program]) -> list[Verdict]:
    """Verdicts on programs that are not run."""
    return [Verdict(False, "not run", 0.0) for _ in programs]


def unscored(programs: list[Program]) -> list[Verdict]:
    """No verdicts: there is no sandbox."""
    return []


def verdicts(
    form: str,
    replies: Sequence[Sequence[str]],
    docs: Sequence[dict[str, Any]],
    run: Run | None = None,
    places: Sequence[str] = (),
) -> list[list[dict[str, Any]]]:
    """The verdicts on all replies to each item: lm-eval's filter of tasks whose replies run."""
    programs = []
    for index, (doc, texts) in enumerate(zip(docs, replies, strict=True)):
        where = places[index] if places else f"item {index}"
        try:
            programs += [FORMS[form](doc, reply) for reply in texts]
        except KeyError as error:
            raise DataError(f"{where}: the item has no {error} for form '{form}'") from None
        except (TypeError, AttributeError, DataError) as error:
            raise DataError(f"{where}: not an item of form '{form}': {error}") from None
    results = (run or _run.get() or Sandbox().run_all)(programs)
    rows = iter([{"passed": verdict.passed, "reason": verdict.reason} for verdict in results])
    return [list(itertools.islice(rows, len(texts))) for texts in replies]


def pass_rate(verdicts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """pass@1 of an item, the mean over its replies; nothing without verdicts."""
    passed = [float(verdict["passed"]) for verdict in verdicts]
    return {"pass@1": sum(passed) / len(passed)} if passed else {}


def score_code(
    samples: str | Path,
    form: str = "humaneval",
    sandbox: Sandbox | None = None,
    allow_unsafe_local: bool = False,
) -> dict[str, Any]:
    """Run the programs of a samples file against their tests.

    Args:
        samples: ``samples.jsonl`` as :func:`moe_finetune.evaluation.engine.evaluate` wrote it.
        form: ``"humaneval"`` or ``"mbpp"``.
        sandbox: an open sandbox to use; by default one is opened and closed.

    Returns:
        ``{"pass@1", "stderr", "n", "passed", "sandbox", "samples"}``; with several replies an item
        pass@1 is the mean over them. ``<samples>.scored.jsonl`` contains the verdict on every
        reply.
    """
    if form not in FORMS:
        raise EvaluationError(f"unknown form '{form}'{did_you_mean(form, FORMS)}")
    path = Path(samples)
    rows = read_rows(path, ("doc", "replies"))
    places = [f"{path}, row {number}" for number in range(1, len(rows) + 1)]
    for row, where in zip(rows, places, strict=True):
        try:
            replies = row["replies"][0]
        except (IndexError, KeyError, TypeError):
            replies = None
        if not replies or not all(isinstance(reply, str) for reply in replies):
            raise DataError(f"{where}: replies have no text")
    active = sandbox or Sandbox(allow_unsafe_local=allow_unsafe_local)
    texts, docs = [row["replies"][0] for row in rows], [row["doc"] for row in rows]
    scored = verdicts(form, texts, docs, active.run_all, places)
    for row, row_verdicts in zip(rows, scored, strict=True):
        row["verdicts"] = row_verdicts
        row["metrics"] = {**row.get("metrics", {}), **pass_rate(row_verdicts)}
    scores = [row["metrics"]["pass@1"] for row in rows]
    target = path.with_name(f"{path.stem}.scored.jsonl")
    write_jsonl(target, rows)
    mean, deviation = mean_and_deviation(scores)
    return {
        "pass@1": mean,
        "stderr": None if deviation is None else deviation / math.sqrt(len(scores)),
        "n": len(scores),
        "passed": sum(v["passed"] for row in rows for v in row["verdicts"]),
        "sandbox": active.kind,
        "samples": str(target),
    }
