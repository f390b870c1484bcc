"""Verbs that score checkpoints and compare scores."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from moe_finetune.cli.app import app, write_json
from moe_finetune.io import write_new
from moe_finetune.io.run_folder import results_in


class Backend(enum.StrEnum):
    """Engines that evaluate."""

    vllm = "vllm"
    hf = "hf"
    server = "server"


class Overflow(enum.StrEnum):
    """What happens to prompts that are longer than the context."""

    error = "error"
    truncate = "truncate"


@app.command("eval")
def evaluate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT|RESULTS...",
            help="Run, checkpoint folder or hub id; or finished results, for judge and people.",
            show_default=False,
        ),
    ],
    suite: Annotated[
        str | None, typer.Option("--suite", "-s", help="Name or YAML file of a suite.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for results.json, or sheets.")
    ] = None,
    backend: Annotated[
        Backend | None, typer.Option("--backend", "-b", help="Default: vllm where usable.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="PEFT adapter over it (hf only).")
    ] = None,
    determinantal: Annotated[
        float | None,
        typer.Option(
            "--determinantal", metavar="EPS", help="Greedy determinant, not top-k (hf only)."
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option("--candidates", metavar="N", min=1, help="Experts that it tries; all."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder of local task data.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="First items only.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="LABEL", help="This task; repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what can run, what is missing, and how much it is.")
    ] = False,
    parity: Annotated[
        list[Backend] | None,
        typer.Option("--parity", metavar="BACKEND", help="Compare answers; give it twice."),
    ] = None,
    overflow: Annotated[
        Overflow, typer.Option("--overflow", help="Prompts longer than the context.")
    ] = Overflow.error,
    allow_unsafe_local: Annotated[
        bool,
        typer.Option("--allow-unsafe-local", help="Run generated programs without a sandbox."),
    ] = False,
    judge: Annotated[
        str | None, typer.Option("--judge", metavar="MODEL", help="Have a model judge answers.")
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option("--judge-url", metavar="URL", help="Its endpoint; default OpenAI.")
    ] = None,
    judge_prices: Annotated[
        str | None,
        typer.Option("--judge-prices", metavar="IN,OUT", help="Dollars per million tokens."),
    ] = None,
    sheets: Annotated[
        int | None,
        typer.Option("--sheets", metavar="N", min=1, help="Write blinded sheets over N items."),
    ] = None,
    annotations: Annotated[
        list[Path] | None,
        typer.Option(
            "--annotations", metavar="FILE", exists=True, help="Filled-in sheet; one an annotator."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", exists=True, help="key.json of the sheets."),
    ] = None,
    vllm: Annotated[
        list[str] | None, typer.Option("--vllm", metavar="KEY=VALUE", help="Engine argument.")
    ] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="Server's address.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Server's model name.")] = None,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N|auto", help="Requests side by side.")
    ] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="Computation type.")] = "auto",
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Evaluate a checkpoint on a suite; repeated, it continues a run that stopped.

    Example: moe-finetune eval runs/erc/merged --suite gsm8k --backend vllm --output eval/erc

    \b
    What can run here?          eval CHECKPOINT -s paper0 --data-dir DATA --check
    Same answers on backends?   eval CHECKPOINT -s demo -o parity --parity vllm --parity hf
    A model as judge:           eval eval/erc --judge gpt-4o
    People, blinded:            eval eval/aux eval/erc --sheets 100 -o study
    What they said:             eval eval/aux eval/erc --annotations F.csv --key study/.../key.json
    """
    from moe_finetune.evaluation.commands import Request, run
    from moe_finetune.recipe.tree import load_tree

    if batch_size != "auto" and not (batch_size.isdigit() and int(batch_size)):
        raise typer.BadParameter(f"--batch-size {batch_size}: wanted a number or auto")
    code = run(
        Request(
            sources,
            suite,
            output,
            data_dir=data_dir,
            limit=limit,
            only=only or (),
            check=check,
            parity=[kind.value for kind in parity or []],
            overflow=overflow.value,
            allow_unsafe_local=allow_unsafe_local,
            judge=judge,
            judge_url=judge_url,
            judge_prices=judge_prices,
            sheets=sheets,
            annotations=annotations or (),
            key=key,
            backend=backend.value if backend else None,
            engine={
                "vllm": load_tree([], vllm or []).values,
                "base_url": base_url,
                "model": model,
                "batch_size": batch_size if batch_size == "auto" else int(batch_size),
                "adapter": adapter,
                "determinantal": determinantal,
                "candidates": candidates,
                "dtype": dtype,
                "seed": seed,
            },
        )
    )
    if code:
        raise typer.Exit(code)


@app.command()
def compare(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="eval or run folders, or two traces.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write .html or .json here.")
    ] = None,
) -> None:
    """Compare evaluations, or two routing traces, with the first: differences, intervals, tests.

    Evaluations are compared item by item; traces (folders of `analyze`, or .npz) by their metrics
    and by the share of tokens that keep their expert.

    Example: moe-finetune compare runs/aux_loss/eval runs/erc/eval --output compare.html
    """
    from moe_finetune.errors import DataError
    from moe_finetune.evaluation.comparison import compare as compare_results
    from moe_finetune.io.atomic import refuse_existing
    from moe_finetune.report.analysis import comparison_text, find_trace
    from moe_finetune.report.page import comparison_page
    from moe_finetune.routing.comparison import compare_traces
    from moe_finetune.routing.trace import RoutingTrace

    if output is not None and output.suffix not in (".html", ".json"):
        raise typer.BadParameter(f"{output}: wanted a name that ends in .html or .json")
    if output is not None:
        refuse_existing(output)
    traces = [trace for trace in map(find_trace, results) if trace is not None]
    if not traces:
        comparison = compare_results([results_in(path) for path in results])
        print(comparison.to_text())
        if output is not None:
            is_json = output.suffix == ".json"
            write_new(output, comparison.to_json() if is_json else comparison_page(comparison))
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
