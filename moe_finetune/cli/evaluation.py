"""Verbs that score checkpoints and compare scores."""

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_finetune.cli.app import app, write_json
from moe_finetune.io import output_lock, write_new
from moe_finetune.io.run_folder import RESULTS_FILE, RunFolder, checkpoint_in, results_in
from moe_finetune.io.terminal import terminal

if TYPE_CHECKING:
    from moe_finetune.evaluation.results import Results


_UNUSABLE = re.compile(r"^\s*$|<\|?\w+\|?>")
"""A reply without text, or with a special token of a chat."""


class Backend(enum.StrEnum):
    """Backends that evaluate."""

    vllm = "vllm"
    hf = "hf"
    server = "server"


class Overflow(enum.StrEnum):
    """What happens to prompts that are longer than the context."""

    error = "error"
    truncate = "truncate"


@app.command("eval")
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Run, checkpoint folder or hub id.")
    ],
    suite: Annotated[
        str | None, typer.Option("--suite", "-s", help="Name or YAML file of a suite.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results.json; of a run: RUN/eval."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder of local task data.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Evaluate only the first N items.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="LABEL", help="Evaluate only this task; may be repeated."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Report what can run, what is missing, and its size; run nothing."
        ),
    ] = False,
    overflow: Annotated[
        Overflow,
        typer.Option("--overflow", help="What to do with prompts longer than the context."),
    ] = Overflow.error,
    allow_unsafe_local: Annotated[
        bool, typer.Option("--allow-unsafe-local", help="Run generated programs without a sandbox.")
    ] = False,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of few-shot examples, bootstraps and vLLM.")
    ] = 0,
    backend: Annotated[
        Backend | None,
        typer.Option("--backend", "-b", help="What runs the model; default: vllm where usable."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="PEFT adapter to apply (hf only).")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Number format of the computation.")
    ] = "auto",
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N|auto", help="Requests in one batch.")
    ] = "auto",
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            "--vllm", metavar="KEY=VALUE", help="Argument of vLLM's engine; may be repeated."
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="The server's address.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name on the server.")
    ] = None,
) -> None:
    """Evaluate a checkpoint on a suite. The same command continues an interrupted evaluation.

    Example: moe-finetune eval runs/erc/merged --suite gsm8k --backend vllm --output eval/erc

    What can run here, without a model: eval CHECKPOINT -s paper0 --data-dir DATA --check
    """
    if batch_size != "auto" and not (batch_size.isdigit() and int(batch_size)):
        raise typer.BadParameter(f"--batch-size {batch_size}: expected a number or auto")
    if suite is None:
        raise typer.BadParameter("--suite: name the suite to evaluate, for example gsm8k")
    from moe_finetune.evaluation.suites import load_suite, select
    from moe_finetune.models.config_and_tokenizer import existing_folder

    chosen = load_suite(suite)
    if only:
        chosen = select(chosen, only)
    run = RunFolder(checkpoint) if RunFolder(checkpoint).recipe.is_file() else None
    checkpoint = str(checkpoint_in(checkpoint))
    if check:
        from moe_finetune.evaluation.what_can_run import check_suite, render_checks
        from moe_finetune.models.config_and_tokenizer import load_tokenizer

        existing_folder(checkpoint)
        checks = check_suite(
            chosen, data_dir, load_tokenizer(checkpoint), limit, allow_unsafe_local
        )
        print(render_checks(checks))
        if chosen.external:
            print(chosen.external)
        if not all(task.runnable for task in checks):
            raise typer.Exit(2)
        return
    if output is None:
        existing_folder(checkpoint)
        if run is None:
            raise typer.BadParameter("--output: name the folder for the results")
        output = run.evaluation
        refuse_other_suite(output, chosen.name)
    with output_lock(output):
        existing_folder(checkpoint)
        from moe_finetune.evaluation.engine import evaluate as run_suite
        from moe_finetune.evaluation.results import results_text
        from moe_finetune.recipe.yaml_tree import load_tree

        with library_log(output / "eval.log"):
            results = run_suite(
                checkpoint,
                chosen,
                backend=backend.value if backend else None,
                output=output,
                data_dir=data_dir,
                limit=limit,
                seed=seed,
                overflow=overflow.value,
                allow_unsafe_local=allow_unsafe_local,
                vllm=load_tree([], vllm or []).values,
                base_url=base_url,
                model=model,
                batch_size=batch_size if batch_size == "auto" else int(batch_size),
                adapter=adapter,
                dtype=dtype,
            )
        print(results_text(results))
        from moe_finetune.data.trained_form import CHAT, trained_form

        for line in malformed(output, results, run is not None and trained_form(run) == CHAT):
            print(line)
        print(f"results: {output / RESULTS_FILE}")
    if run is None:
        return
    if output.resolve() == run.evaluation.resolve():
        from moe_finetune.report import write_report

        print(f"report: {write_report([run.path], run.page)}")
    else:
        print(
            f"these scores are only in {output}: the page of {run.path} and 'compare {run.path}' "
            f"show those in {run.evaluation}"
        )


def malformed(output: Path, results: "Results", trained_on_chats: bool) -> Iterator[str]:
    """Of each task whose replies have the wrong form, the first wrong one, and what to check.

    So has a task without a right reply, one that was asked without ``chat`` of a run that was
    trained on chats, and one where most replies are empty, have special tokens or no answer.
    """
    for label, task in results["tasks"].items():
        replies = list(_wrong_replies(output / str(task.get("samples")), str(task.get("metric"))))
        value, asked_bare = task.get("value"), not task.get("chat")
        if value is None or not replies:
            continue
        unusable = sum(_UNUSABLE.search(reply) is not None for reply in replies)
        if value == 0:
            problem = "no reply was right"
        elif asked_bare and trained_on_chats:
            problem = "the run was trained on chats, and this task asks without one"
        elif asked_bare and 2 * unusable > task.get("n", 0):
            problem = f"{unusable} of {task['n']} replies are empty or have no answer"
        else:
            continue
        trained = (
            "trained on chats needs chat: true"
            if asked_bare
            else ("not trained on chats needs chat: false")
        )
        yield (
            f"{label}: {problem}; the first wrong reply is {replies[0][:80]!r}. A model that was "
            f"{trained} in the suite"
        )


def _wrong_replies(samples: Path, metric: str) -> Iterator[str]:
    """The texts that were not right; none of tasks that compare log-probabilities."""
    from moe_finetune.io.row_files import placed_rows

    for _, row in placed_rows(samples, finite=False) if samples.is_file() else ():
        replies = row.get("replies")
        while isinstance(replies, list) and replies:
            replies = replies[0]
        if isinstance(replies, str) and not (row.get("metrics") or {}).get(metric):
            yield replies


@contextmanager
def library_log(log: Path) -> Iterator[None]:
    """Collect what vLLM and other libraries print in ``log``; name it if the work fails."""
    new_folder = not log.parent.exists()
    try:
        with terminal().log_to(log):
            yield
    except Exception:
        if log.is_file() and log.stat().st_size:
            terminal().say(f"library output: {log}", "warning")
        raise
    finally:
        if log.is_file() and not log.stat().st_size:
            log.unlink()
        if new_folder and log.parent.is_dir() and not any(log.parent.iterdir()):
            log.parent.rmdir()  # the input was refused


def refuse_other_suite(folder: Path, suite: str) -> None:
    """Refuse to replace a run's scores of another suite, unless the folder is named."""
    from moe_finetune.errors import OutputExistsError
    from moe_finetune.evaluation.results import load_results

    if (folder / RESULTS_FILE).is_file():
        earlier = load_results(folder).get("suite", {}).get("name")
        if earlier != suite:
            raise OutputExistsError(
                f"{folder} has the scores of suite {earlier}; name another folder with --output"
            )


@app.command()
def compare(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="Runs or folders of results, or two traces."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Also write the comparison to this .html or .json."),
    ] = None,
) -> None:
    """Compare evaluations or routing traces with the first one.

    Evaluations are compared item by item; traces (folders of `analyze`, or .npz) by their metrics
    and by the share of tokens that keep their expert.

    Example: moe-finetune compare runs/aux_loss/eval runs/erc/eval --output compare.html
    """
    from moe_finetune.cli.missing import refuse_no_path
    from moe_finetune.errors import DataError, EvaluationError
    from moe_finetune.io.atomic import refuse_existing
    from moe_finetune.io.hashes import to_json

    if output is not None and output.suffix not in (".html", ".json"):
        raise typer.BadParameter(f"{output}: expected a name that ends in .html or .json")
    if output is not None:
        refuse_existing(output)
    for path in results:
        refuse_no_path(path, EvaluationError, "no such folder; give a run, results or a trace")
    from moe_finetune.report.analysis import comparison_text, find_trace
    from moe_finetune.routing.comparison import compare_traces
    from moe_finetune.routing.trace import RoutingTrace
    from moe_finetune.study.compare_evaluations import compare as compare_results
    from moe_finetune.study.page import comparison_page
    from moe_finetune.study.render import comparison_text as tests_text

    traces = [trace for trace in map(find_trace, results) if trace is not None]
    if not traces:
        study, table = compare_results([results_in(path) for path in results])
        print(tests_text(table))
        if output is not None and output.suffix == ".json":
            write_new(output, to_json(table.to_mapping(), 1, sort=False) + "\n")
        elif output is not None:
            write_new(output, comparison_page(study, table))
    elif len(traces) != 2 or len(results) != 2:
        raise DataError(
            f"{len(traces)} of {len(results)} paths are traces; give two traces, or evaluations"
        )
    elif output is not None and output.suffix == ".html":
        raise typer.BadParameter(f"{output}: traces are compared as text or .json")
    else:
        first, second = traces
        trace = compare_traces(RoutingTrace.open(first), RoutingTrace.open(second))
        print(comparison_text(first, second, trace))
        if output is not None:
            write_json({"a": str(first), "b": str(second), **trace}, output)
