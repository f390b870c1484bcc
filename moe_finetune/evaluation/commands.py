"""``moe-finetune eval``: run a suite, check it, compare backends, validate the answers."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.suites import Suite, load_suite, select
from moe_finetune.io import output_lock
from moe_finetune.io.run_folder import RESULTS_FILE, checkpoint_in, results_in

_PARITY_ITEMS = 200


@dataclass(frozen=True)
class Request:
    """The arguments of one command.

    Attributes:
        sources: one checkpoint, or folders of finished results.
        suite, output: needed to evaluate; ``output`` is where sheets go otherwise.
        check: only report what can run.
        parity: backends to compare; empty to evaluate.
        judge, judge_url: a model as judge, and its endpoint.
        sheets: items of the blinded sheets; None for no sheets.
        annotations, key: annotated sheets and the key that was written with them.
        engine: arguments of :func:`moe_finetune.evaluation.backends.open_backend`.
    """

    sources: Sequence[str]
    suite: str | None = None
    output: Path | None = None
    data_dir: Path | None = None
    limit: int | None = None
    only: Sequence[str] = ()
    check: bool = False
    parity: Sequence[str] = ()
    overflow: str = "error"
    allow_unsafe_local: bool = False
    judge: str | None = None
    judge_url: str | None = None
    sheets: int | None = None
    annotations: Sequence[Path] = ()
    key: Path | None = None
    backend: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)


def run(request: Request) -> int:
    """Carry out ``request``, print the results, and return the exit code.

    0: success; 1: backends answer differently; 2: a check found something missing.

    Raises:
        EvaluationError: contradictory or incomplete arguments, and errors of the steps.
    """
    _refuse_contradictions(request)
    if request.suite is None and _validates(request):
        request = replace(request, sources=[str(results_in(s)) for s in request.sources])
    folders = [Path(source) for source in request.sources if is_results(source)]
    if folders:
        if len(folders) < len(request.sources):
            raise EvaluationError("give one checkpoint, or folders that all contain results.json")
        if not _validates(request):
            raise EvaluationError(
                f"{folders[0]} contains finished results; add --judge, --sheets or "
                "--annotations, or give a checkpoint to evaluate"
            )
        with ExitStack() as locks:
            for folder in folders:
                locks.enter_context(output_lock(folder))
            _validate(request, folders)
        return 0
    if len(request.sources) > 1:
        raise EvaluationError(
            f"{request.sources[1]} has no results.json; evaluate one checkpoint at a time"
        )
    if request.suite is None:
        if _validates(request):
            raise EvaluationError(
                f"{request.sources[0]} has no {RESULTS_FILE}; give the folder of an evaluation, or "
                "evaluate now with --suite"
            )
        raise EvaluationError("no suite; choose one with --suite")
    request = replace(request, sources=[str(checkpoint_in(request.sources[0]))])
    if request.check:
        return _check(request)
    if request.output is None:
        raise EvaluationError("no folder for the results; set --output")
    with output_lock(request.output):
        if request.parity:
            return _parity(request, request.output)
        _evaluate(request, request.output)
        if _validates(request):
            _validate(request, [request.output])
    return 0


def is_results(source: str | Path) -> bool:
    """Return whether ``source`` is a folder of results rather than a checkpoint."""
    folder = Path(source)
    return (folder / RESULTS_FILE).is_file() and not (folder / "config.json").is_file()


def _validates(request: Request) -> bool:
    return bool(request.judge or request.sheets is not None or request.annotations)


def _refuse_contradictions(request: Request) -> None:
    if request.judge_url and not request.judge:
        raise EvaluationError("--judge-url needs the judge's name, --judge MODEL")
    if bool(request.annotations) != (request.key is not None):
        raise EvaluationError("--annotations FILE and --key FILE must be given together")
    if request.check + bool(request.parity) + _validates(request) > 1:
        raise EvaluationError(
            "--check, --parity and the validations (--judge, --sheets, --annotations) are "
            "different commands; choose one"
        )


def _chosen(request: Request) -> Suite:
    assert request.suite is not None
    suite = load_suite(request.suite)
    return select(suite, request.only) if request.only else suite


def _check(request: Request) -> int:
    from moe_finetune.evaluation.offline import check_suite, render_checks
    from moe_finetune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(request.sources[0])
    checks = check_suite(
        _chosen(request), request.data_dir, tokenizer, request.limit, request.allow_unsafe_local
    )
    print(render_checks(checks))
    return 0 if all(check.runnable or check.external for check in checks) else 2


def _parity(request: Request, output: Path) -> int:
    from moe_finetune.evaluation.parity import parity

    # In lower precision near ties can go either way, so the default dtype is float32.
    chosen = {k: v for k, v in request.engine.items() if (k, v) != ("dtype", "auto")}
    lines = parity(
        request.sources[0],
        request.parity,
        _chosen(request),
        output,
        request.limit or _PARITY_ITEMS,
        request.data_dir,
        **chosen,
    )
    for line in lines:
        drift = line.largest_difference
        print(
            f"{line.task}: {line.first} and {line.second} give {line.equal_answers} of {line.n} "
            f"equal answers to {line.equal_prompts} equal prompts"
            + (f"; log-probabilities within {drift:.1e} nats" if drift is not None else "")
        )
        for item in line.differing:
            print(f"  item {item['doc_id']}: {item[line.first]!r} against {item[line.second]!r}")
    print(f"parity: {output / 'parity.json'}")
    return 0 if all(line.holds for line in lines) else 1


def _evaluate(request: Request, output: Path) -> None:
    from moe_finetune.evaluation.engine import evaluate

    results = evaluate(
        request.sources[0],
        _chosen(request),
        backend=request.backend,
        output=output,
        data_dir=request.data_dir,
        limit=request.limit,
        overflow=request.overflow,
        allow_unsafe_local=request.allow_unsafe_local,
        **request.engine,
    )
    for label, task in results["tasks"].items():
        value, stderr = task["value"], task["stderr"]
        text = "not scored" if value is None else f"{value:.4f}"
        error = f" ± {stderr:.4f}" if stderr is not None else ""
        print(f"{label}: {task['metric']} {text}{error} (n={task['n']})")
    print(f"results: {output / 'results.json'}")


def _validate(request: Request, folders: list[Path]) -> None:
    from moe_finetune.evaluation.agreement import agreement_table
    from moe_finetune.evaluation.validations import generation_tasks, judge_tasks, write_sheets

    tasks = generation_tasks(folders, request.only)
    if request.judge:
        for line in judge_tasks(tasks, request.judge, request.judge_url, request.limit):
            print(line)
    if request.sheets is not None:
        target = request.output or folders[0]
        for sheets in write_sheets(tasks, target / "sheets", request.sheets):
            print(f"sheets: {sheets.csv} and {sheets.html.name}, {sheets.n} answers")
            print(f"key, not for annotators: {sheets.key}")
    if request.judge or request.annotations:
        print(agreement_table(tasks, request.annotations, request.key))
