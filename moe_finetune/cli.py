"""The command line: one function a verb that parses, calls and prints. See ``main`` for errors."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moe_finetune.errors import MoeFinetuneError

app = typer.Typer(
    name="moe-finetune",
    help="Fine-tune Mixture-of-Experts language models with losses that make experts specialize.",
    epilog="Add --debug to any verb to see the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.")]
RecipeItems = Annotated[
    list[str], typer.Argument(metavar="RECIPE... [key.path=value ...]", show_default=False)
]


class Backend(enum.StrEnum):
    """Engines that evaluate."""

    vllm = "vllm"
    hf = "hf"
    server = "server"


class Recorder(enum.StrEnum):
    """What runs a checkpoint whose routing is recorded."""

    hf = "hf"
    vllm = "vllm"


class Overflow(enum.StrEnum):
    """What happens to prompts that are longer than the context."""

    error = "error"
    truncate = "truncate"


class Format(enum.StrEnum):
    """Forms of a report."""

    html = "html"
    json = "json"


class Score(enum.StrEnum):
    """Measures of an expert's relevance."""

    token = "token"
    gate = "gate"


def split_items(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipe files and ``key.path=value`` overrides, from one list of arguments."""
    overrides = [item for item in items if "=" in item and not Path(item).is_file()]
    return [item for item in items if item not in overrides], overrides


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", help="New folder of the demo.")] = Path(
        "runs/demo"
    ),
    backend: Annotated[
        str | None, typer.Option("--backend", help="vllm or hf; default: vllm where it works.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of each fine-tune; default: the recipe's.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the demo in OUTPUT.")
    ] = False,
) -> None:
    """Pretrain a small MoE, fine-tune it with two methods, merge, evaluate, draw the report.

    Example: moe-finetune demo --output runs/demo
    """
    from moe_finetune.demo.path import run_demo

    page = run_demo(output, backend, steps, resume)
    print(f"report: {page}")


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Mend vLLM's CPU build.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, vLLM, GPU and disk; exit 1 on a problem.

    Example: moe-finetune doctor --fix
    """
    from moe_finetune.doctor import as_json, examine, healthy, text

    checks = examine(fix)
    print(as_json(checks) if json else text(checks))
    if not healthy(checks):
        raise typer.Exit(1)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Recipe file; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a checkpoint's family, sizes and routing, and what a recipe would train in it.

    Example: moe-finetune inspect ./Qwen3-30B-A3B --recipe my.yaml
    """
    from json import dumps

    from moe_finetune.inspection import inspect_checkpoint
    from moe_finetune.recipe import load_recipe

    inspection = inspect_checkpoint(checkpoint, load_recipe(recipe) if recipe else None)
    print(dumps(inspection.to_mapping(), indent=2) if json else inspection.text())


@app.command()
def convert(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    output: Output,
) -> None:
    """Write a copy that needs no remote code: config, fast tokenizer, the same weights (linked).

    Example: moe-finetune convert moonshotai/Moonlight-16B-A3B --output ./moonlight
    """
    from moe_finetune.families.convert import convert_checkpoint
    from moe_finetune.families.loading import local_folder

    print(f"checkpoint: {convert_checkpoint(local_folder(checkpoint), output)}")


@app.command()
def train(
    items: RecipeItems,
    output: Output,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUTPUT.")] = False,
) -> None:
    """Carry out a recipe: train, merge, verify, evaluate, report.

    Several recipes and key.path=value overrides are merged; later ones win.

    Example: moe-finetune train recipes/models/qwen3_30b_a3b.yaml recipes/methods/erc.yaml
    data.train=my.jsonl trainer.max_steps=50 --output runs/erc
    """
    from moe_finetune.recipe import load_recipe
    from moe_finetune.run import run_recipe

    files, overrides = split_items(items)
    run = run_recipe(load_recipe(files, overrides), output, resume=resume)
    print(f"run: {run}")


@app.command()
def merge(
    source: Annotated[Path, typer.Argument(metavar="RUN|ADAPTER", help="Run or adapter folder.")],
    output: Output,
    base: Annotated[
        str | None, typer.Option("--base", help="Base checkpoint; default: the adapter's own.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, float16 or bfloat16; default: stored.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with base + adapter afterwards.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    drop_bias: Annotated[
        bool, typer.Option("--drop-bias", help="Leave a routing bias out where it has no place.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="OWNER/NAME", help="Also upload to the hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the pushed repository private.")
    ] = False,
) -> None:
    """Write base + adapter as an ordinary checkpoint, shard by shard.

    Example: moe-finetune merge runs/erc --verify --output merged/erc
    """
    from moe_finetune.families.loading import local_folder
    from moe_finetune.training.save import load_bias
    from moe_finetune.weights import merge_adapter
    from moe_finetune.weights.push import check_push, push_checkpoint

    adapter = source / "adapter" if (source / "adapter").is_dir() else source
    folder = local_folder(base) if base is not None else base_of(adapter)
    if push is not None:
        check_push(push)
    bias = load_bias(adapter)
    report = merge_adapter(
        folder,
        adapter,
        output,
        dtype=dtype,
        dry_run=dry_run,
        bias=bias,
        bias_export="drop" if drop_bias else "keep",
    )
    if dry_run:
        print(report.plan.table())
        return
    print(f"merged: {output} ({report.changed} tensors changed, {report.copied} copied)")
    if verify:
        from moe_finetune.weights.verify import verify_merge

        check = verify_merge(folder, adapter, output, bias=bias)
        print(f"verified: {check.mode} within {check.max_rel:.1e}, bound {check.tolerance:.0e}")
    if push is not None:
        print(f"pushed: {push_checkpoint(output, push, private)}")


def base_of(adapter: Path) -> Path:
    """The folder of the base checkpoint that an adapter names, at the revision it names."""
    from moe_finetune.errors import AdapterError
    from moe_finetune.families.loading import local_folder
    from moe_finetune.weights.adapter import open_adapter

    config = open_adapter(adapter).config
    named = config.get("base_model_name_or_path")
    if not named:
        raise AdapterError(f"{adapter}: names no base checkpoint; give it with --base")
    return local_folder(str(named), revision=config.get("revision"))


@app.command("eval")
def evaluate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT|RESULTS...",
            help="Checkpoint folder or hub id; or finished results, for judge and people.",
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
    """Evaluate a checkpoint on a suite; a run that stopped goes on when repeated.

    Example: moe-finetune eval runs/erc/merged --suite gsm8k --backend vllm --output eval/erc

    \b
    What can run here?          eval CHECKPOINT -s paper0 --data-dir DATA --check
    Same answers on backends?   eval CHECKPOINT -s demo -o parity --parity vllm --parity hf
    A model as judge:           eval eval/erc --judge gpt-4o
    People, blinded:            eval eval/aux eval/erc --sheets 100 -o study
    What they said:             eval eval/aux eval/erc --annotations F.csv --key study/.../key.json
    """
    from moe_finetune.evaluation.commands import Request, run
    from moe_finetune.layered_yaml import load_tree

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
                "dtype": dtype,
                "seed": seed,
            },
        )
    )
    if code:
        raise typer.Exit(code)


@app.command()
def analyze(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|TRACE", help="Folder, hub id or .npz trace.")
    ],
    output: Output,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Text to record; a domain by its name.")
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", metavar="NAME=FILE", help="Text of a domain.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="PEFT adapter over the checkpoint.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rows of a domain.")] = None,
    max_length: Annotated[int, typer.Option("--max-length", min=2, help="Tokens of a row.")] = 2048,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Store all experts' probabilities.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="Computation type.")] = "auto",
    backend: Annotated[
        Recorder, typer.Option("--backend", "-b", help="vllm tells the selected experts only.")
    ] = Recorder.hf,
    vllm: Annotated[
        list[str] | None, typer.Option("--vllm", metavar="KEY=VALUE", help="Engine argument.")
    ] = None,
) -> None:
    """Record which experts the tokens go to, measure it, and draw a page.

    Of a checkpoint: a trace (for select, place and compare), numbers and a page; of a trace:
    numbers and a page.

    Example: moe-finetune analyze ./my-moe --domain law=law.jsonl --domain math=math.jsonl
    --limit 200 --output analysis/my-moe
    """
    from moe_finetune.analysis import analyze as run_analysis
    from moe_finetune.layered_yaml import load_tree

    page = run_analysis(
        source,
        output,
        split_domains(data or [], domain or []),
        adapter=adapter,
        limit=limit,
        max_length=max_length,
        probabilities=probabilities,
        dtype=dtype,
        backend=backend.value,
        engine=load_tree([], vllm or []).values,
    )
    print(f"report: {page}")


def split_domains(data: Sequence[str], domains: Sequence[str]) -> dict[str, list[str]]:
    """Files by domain, from ``--data FILE`` (named by the file) and ``--domain NAME=FILE``."""
    found: dict[str, list[str]] = {}
    for file in data:
        found.setdefault(Path(file).name.partition(".")[0], []).append(file)
    for item in domains:
        name, equals, file = item.partition("=")
        if not (name and equals and file):
            raise typer.BadParameter(f"--domain {item}: wanted NAME=FILE")
        found.setdefault(name, []).append(file)
    return found


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="Run, checkpoint folder or hub id.")
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name; default: the folder's.")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, help="GPUs that share each layer.")
    ] = 1,
    data_parallel: Annotated[
        int, typer.Option("--data-parallel", min=1, help="Replicas that share the requests.")
    ] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Spread the experts over those GPUs.")
    ] = False,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Adapter to serve over the base, unmerged.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds until it must be ready.")
    ] = 1800.0,
) -> None:
    """Serve a merged checkpoint with vLLM. Ctrl-C stops it.

    What follows -- goes to `vllm serve` as it is, such as -- --max-model-len 4096.

    Example: moe-finetune serve runs/erc --tensor-parallel 4 --expert-parallel
    -- --max-model-len 4096
    """
    from moe_finetune.serving import ServeOptions
    from moe_finetune.serving import serve as run_server

    options = ServeOptions(
        host=host,
        port=port,
        name=name,
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        expert_parallel=expert_parallel,
        adapter=adapter,
        extra=tuple(context.args),
    )
    code = run_server(source, options, timeout)
    if code:
        raise typer.Exit(code)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN|DIR...", help="First: the baseline.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File or folder; default: report.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's heading.")] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", metavar="A,B,...", help="A name for each run.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="Page or numbers.")] = Format.html,
) -> None:
    """Draw runs side by side on one HTML page that opens offline, or print their numbers.

    Example: moe-finetune report runs/aux_loss runs/erc --labels aux,ERC --output report
    """
    from moe_finetune.report import report_numbers, write_report

    names = [name.strip() for name in labels.split(",")] if labels is not None else None
    if format is Format.html:
        print(f"report: {write_report(runs, output or Path('report'), title, names)}")
        return
    write_json(report_numbers(runs, names), output)


@app.command()
def compare(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="eval folders, or two traces.")
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
    from moe_finetune.analysis import find_trace
    from moe_finetune.errors import DataError, OutputExistsError

    if output is not None and output.suffix not in (".html", ".json"):
        raise typer.BadParameter(f"{output}: wanted a name that ends in .html or .json")
    if output is not None and output.exists():
        raise OutputExistsError(f"{output} exists; choose another --output")
    traces = [found for found in map(find_trace, results) if found is not None]
    if not traces:
        compare_evaluations(results, output)
    elif len(traces) != 2 or len(results) != 2:
        raise DataError(
            f"{len(traces)} of {len(results)} paths are traces; give two traces, or evaluations"
        )
    elif output is not None and output.suffix == ".html":
        raise typer.BadParameter(f"{output}: traces are compared as text or .json")
    else:
        compare_two_traces(traces[0], traces[1], output)


def compare_evaluations(results: Sequence[Path], output: Path | None) -> None:
    """Print, and write where asked, the comparison of evaluations."""
    from moe_finetune.evaluation.compare import compare as compare_results

    comparison = compare_results(results)
    print(comparison.to_text())
    if output is not None:
        page = comparison.to_json() if output.suffix == ".json" else comparison.to_html()
        output.write_text(page, encoding="utf-8")


def compare_two_traces(first: Path, second: Path, output: Path | None) -> None:
    """Print, and write where asked, the comparison of two traces."""
    from moe_finetune.analysis import comparison_text
    from moe_finetune.capture.trace import RoutingTrace
    from moe_finetune.metrics.compare import compare_traces

    found = compare_traces(RoutingTrace.open(first), RoutingTrace.open(second))
    print(comparison_text(first, second, found))
    if output is not None:
        write_json({"a": str(first), "b": str(second), **found}, output)


def write_json(document: object, output: Path | None) -> None:
    """Write ``document`` to a file, or print it."""
    from json import dumps

    text = dumps(document, indent=2, allow_nan=False)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


@app.command(context_settings={"allow_extra_args": True})
def place(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="Routing trace (folder or .npz).")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Expert-parallel ranks.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Plan file to write; with --bench a folder.")
    ],
    max_imbalance: Annotated[
        float, typer.Option("--max-imbalance", min=1.0, help="Largest rank load over the mean.")
    ] = 1.3,
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Routing groups (n_group), which stay whole.")
    ] = 1,
    bench: Annotated[
        Path | None,
        typer.Option("--bench", metavar="FILE", help="Measure vLLM's samples/s on these rows."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="TRACE", help="Bench: another model, placed by its own."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Bench: rows.")] = 512,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=1, help="Bench: tokens of an answer.")
    ] = 128,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Bench: times each.")] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Bench: say what would be started.")
    ] = False,
) -> None:
    """Plan which rank holds which expert, so that tokens cross ranks less; for `permute`.

    Plans on the first half of the sequences and shows what that does to the other half.

    With --bench FILE it measures samples/s of vLLM under expert parallelism, on as many GPUs as
    ranks: the trace's checkpoint with experts in round robin, the same placed by the plan, and the
    checkpoint of --against placed by its own plan. What follows -- goes to `vllm serve`.

    Example: moe-finetune place traces/law --ranks 8 --output plan.json

    \b
    moe-finetune place traces/aux --against traces/coupling --ranks 8 --bench law.jsonl -o bench
    """
    from moe_finetune.capture.trace import RoutingTrace
    from moe_finetune.placement.held_out import plan_trace
    from moe_finetune.placement.throughput import Bench, run_bench

    opened = RoutingTrace.open(trace)
    if bench is not None:
        asked = Bench(
            ranks=ranks,
            rows=bench,
            output=output,
            max_imbalance=max_imbalance,
            groups=groups,
            samples=samples,
            output_tokens=output_tokens,
            repeat=repeat,
            extra=tuple(context.args),
        )
        traces = [opened, *([RoutingTrace.open(against)] if against is not None else [])]
        print(run_bench(asked, traces, dry_run))
        return
    if against is not None or dry_run or context.args:
        raise typer.BadParameter("--against, --dry-run and what follows -- belong to --bench FILE")
    found = plan_trace(opened, ranks, max_imbalance, groups)
    for name, metrics in found.metrics.items():
        print(f"{name:<12}", ", ".join(f"{k} {v:.3f}" for k, v in metrics.items()))
    found.plan.write(output)
    print(f"plan: {output}")


@app.command()
def select(
    trace: Annotated[Path, typer.Argument(help="Routing trace (folder or .npz).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file to write.")],
    score: Annotated[Score, typer.Option("--score", help="Relevance measure.")] = Score.token,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of relevance to keep.")] = 0.2,
    domain: Annotated[str | None, typer.Option("--domain", help="Only this domain.")] = None,
) -> None:
    """Choose the experts that a task relies on (ESFT), for lora.experts in a recipe.

    Example: moe-finetune select traces/law --top-p 0.2 --output law.json
    """
    from moe_finetune.capture.trace import RoutingTrace
    from moe_finetune.lora.select import ExpertSelection, select_experts

    opened = RoutingTrace.open(trace)
    info = opened.info
    chosen = select_experts(
        opened.load("ids", domain),
        opened.load("weights", domain) if score is Score.gate else None,
        info.num_experts,
        score=score.value,
        top_p=top_p,
    )
    experts = dict(zip(info.layers, chosen, strict=True))
    ExpertSelection(experts, info.model_type, info.num_experts, score.value, top_p).write(output)
    print(f"{sum(map(len, chosen))} experts in {len(chosen)} layers: {output}")


@app.command()
def permute(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    permutation: Annotated[
        Path,
        typer.Option("--permutation", "-p", help='`place`\'s plan, or {"LAYER": [expert, ...]}.'),
    ],
    output: Output,
) -> None:
    """Write a checkpoint with the experts of some layers in another order; it computes the same.

    Example: moe-finetune permute ./my-moe --permutation order.json --output ./my-moe-placed
    """
    from moe_finetune.families.loading import local_folder
    from moe_finetune.weights.permute import permute_experts

    folder = local_folder(checkpoint)
    permute_experts(folder, read_order(permutation, folder), output)
    print(f"checkpoint: {output}")


def read_order(file: Path, checkpoint: Path) -> dict[int, list[int]]:
    """Old expert at each new place by layer, from a plan for this model or a plain permutation."""
    from moe_finetune.errors import CheckpointError
    from moe_finetune.placement.plan import PlacementPlan
    from moe_finetune.weights.checkpoint import read_config, read_json
    from moe_finetune.weights.permute import read_permutation

    if file.is_file() and "format" not in read_json(file):
        return read_permutation(file)
    plan = PlacementPlan.read(file)
    model_type = read_config(checkpoint).get("model_type")
    if plan.model_type != model_type:
        raise CheckpointError(
            f"{file}: is a plan for {plan.model_type}, and {checkpoint} is a {model_type}; "
            "make one from this model's trace with 'moe-finetune place'"
        )
    return dict(zip(plan.layers, plan.permutation_LE().tolist(), strict=True))


@app.command()
def study(
    recipe: Annotated[str, typer.Argument(help="Study file, or the name of one that is shipped.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key.path=value ...]",
            help="Recipe keys go into every run; seeds=, baseline=, launch.*= are the study's.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The study's folder; new or empty.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show runs, memory and time; start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; finished runs are skipped.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Only every N-th run, from the I-th."),
    ] = None,
) -> None:
    """Run a recipe over methods, models, data and seeds, and tabulate what came out.

    Exit code 1 when a run failed; the others are finished, and --resume tries it again.

    Example: moe-finetune study recipes/studies/paper0_table1.yaml seeds=[1,2,3] --output table1
    """
    from moe_finetune.studies.commands import carry_out_study, show_plan

    if plan:
        show_plan(recipe, overrides or [], output)
        return
    if output is None:
        raise typer.BadParameter("--output: is missing; name the study's folder")
    if carry_out_study(recipe, overrides or [], output, resume, shard):
        raise typer.Exit(1)


@app.command()
def upcycle(
    items: RecipeItems,
    output: Output,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            help="dense, cluster, experts, merge, router, finetune or evaluate alone.",
        ),
    ] = None,
    expert: Annotated[
        int | None,
        typer.Option("--expert", metavar="N", help="Of the stage experts this one alone."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in OUTPUT; finished steps are kept.")
    ] = False,
) -> None:
    """Make a MoE of a dense model: cluster texts, train experts, merge, teach routers, compare.

    Example: moe-finetune upcycle recipes/upcycle/miniature.yaml --output runs/svmoe
    """
    from moe_finetune.upcycle.command import upcycle_files

    files, overrides = split_items(items)
    print(f"upcycle: {upcycle_files(files, overrides, output, stage, expert, resume)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code.

    0 success; 1 a failure of the machine, or of ``doctor``'s checks; 2 a wrong input, with one
    message on stderr; 130 interrupted. ``--debug`` anywhere shows the traceback instead.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("moe_finetune").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        return app(arguments, prog_name="moe-finetune", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except MoeFinetuneError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not hasattr(error, "exit_code") or not hasattr(error, "show"):
            raise
        error.show()  # a usage error: typer knows how to say it
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
