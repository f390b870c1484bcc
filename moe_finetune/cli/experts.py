"""Commands that record routing, select experts, and write checkpoints with only some of them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_finetune.cli.app import Output, app
from moe_finetune.io import output_lock
from moe_finetune.io.atomic import refuse_existing
from moe_finetune.io.counted import counted
from moe_finetune.io.folder import check_output
from moe_finetune.io.run_folder import RunFolder, checkpoint_in

if TYPE_CHECKING:
    from moe_finetune.models.expert_groups import ExpertGroups
    from moe_finetune.routing.trace import RoutingTrace

# Metrics of router and gate weights, without tokens (P2 Tables 2 and 3): printed as layer means.
SHOWN_VALUES = (
    *("max_violation", "score_entropy", "score_variance", "expert_overlap"),
    *("erc_loss", "erc_least_alpha", "noise_level", "router_cosine"),
    *("router_norm_mean", "router_norm_std", "gate_norm_mean", "gate_norm_std"),
)


class Score(enum.StrEnum):
    """Measures of an expert's relevance."""

    token = "token"
    gate = "gate"
    reap = "reap"
    gained = "gained"


@app.command()
def analyze(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|TRACE", help="Checkpoint folder, hub id, or a .npz trace."
        ),
    ],
    output: Output,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="Text to record; the file's name is its domain."),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option("--domain", metavar="NAME=FILE", help="Text to record for this domain."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="PEFT adapter over the checkpoint.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Rows to record per domain.")
    ] = None,
    max_length: Annotated[
        int, typer.Option("--max-length", min=2, help="Longest row in tokens.")
    ] = 2048,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also store the probabilities of all experts.")
    ] = False,
    norms: Annotated[
        bool,
        typer.Option("--norms", help="Also store the lengths of experts' outputs, for REAP."),
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Number format of the computation.")
    ] = "auto",
) -> None:
    """Record which experts tokens select, measure it, draw a page.

    A checkpoint gives a trace (for select and compare), numbers and a page; a trace gives
    numbers and a page.

    Example: moe-finetune analyze ./my-moe --domain law=law.jsonl --domain math=math.jsonl
    --limit 200 --output analysis/my-moe
    """
    from moe_finetune.errors import DataError
    from moe_finetune.io.json_file import read_object
    from moe_finetune.io.next_commands import listed, program
    from moe_finetune.io.split_files import local_files
    from moe_finetune.metrics.words import word
    from moe_finetune.models.config_and_tokenizer import existing_folder

    domains = split_domains(data or [], domain or [])
    with output_lock(output):
        if Path(source).suffix != ".npz":
            existing_folder(source)
        for file in itertools.chain(*domains.values()):
            local_files(file, "train")
        check_output(output)
        from moe_finetune.report.analysis import analyze as run_analysis  # imports the libraries

        page = run_analysis(
            source,
            output,
            domains,
            adapter=adapter,
            limit=limit,
            max_length=max_length,
            probabilities=probabilities,
            norms=norms,
            dtype=dtype,
        )
    means = read_object(RunFolder(output).summary, DataError, "analyze again")["mean"]
    for name in SHOWN_VALUES:
        if name in means:
            about = word(f"routing/{name}")
            print(f"{about.name:<24}{means[name]:<10.4g}{about.meaning}".rstrip())
    chosen = [program(), "select", str(output), "--output", "experts.json"]
    print(f"report: {page}\n\n{listed([('the experts of a domain', chosen)])}")


def split_domains(data: Sequence[str], domains: Sequence[str]) -> dict[str, list[str]]:
    """Files by domain, from ``--data FILE`` (named by the file) and ``--domain NAME=FILE``."""
    files_by_name: dict[str, list[str]] = {}
    for file in data:
        files_by_name.setdefault(Path(file).name.partition(".")[0], []).append(file)
    for item in domains:
        name, equals, file = item.partition("=")
        if not (name and equals and file):
            raise typer.BadParameter(f"--domain {item}: write it as NAME=FILE")
        files_by_name.setdefault(name, []).append(file)
    return files_by_name


@app.command()
def select(
    trace: Annotated[Path, typer.Argument(help="A trace, or the folder of `analyze`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file to write.")],
    after: Annotated[
        Path | None, typer.Argument(help="With --score gained: a trace after routers trained.")
    ] = None,
    score: Annotated[
        Score, typer.Option("--score", help="Measure of an expert's relevance.")
    ] = Score.token,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Share of relevance to keep.  [default: 0.2]")
    ] = None,
    top: Annotated[
        str | None, typer.Option("--top", help="Share of each layer's experts, such as 25%.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", help="For prune: share to keep, equally many in each group."),
    ] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="Only this domain.")] = None,
) -> None:
    """Choose the experts that a task relies on, for lora.experts or prune.

    Example: moe-finetune select traces/law --top-p 0.2 --output law.json
    """
    if sum(option is not None for option in (top, top_p, keep)) > 1:
        raise typer.BadParameter("--top, --top-p and --keep: choose one of them")
    share = None if top is None else _share("--top", top)
    kept_share = None if keep is None else _share("--keep", keep)
    top_p = 0.2 if top_p is None and share is kept_share is None else top_p
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"--top-p {top_p:g}: must be above 0 and at most 1")
    if (after is not None) != (score is Score.gained):
        raise typer.BadParameter("--score gained needs two traces, BEFORE and AFTER; others one")
    from moe_finetune.cli.missing import refuse_no_path
    from moe_finetune.errors import DataError

    with output_lock(output):  # another's output is said first
        for path in (trace, *([after] if after is not None else [])):
            refuse_no_path(path, DataError, "no trace found; give a trace folder or an .npz file")
    from moe_finetune.lora.select import (
        ExpertSelection,
        expert_relevance,
        gained_relevance,
        kept_experts,
        reap_relevance,
        top_experts,
        top_p_experts,
    )
    from moe_finetune.report.analysis import open_trace
    from moe_finetune.routing.comparison import check_same_rows

    with output_lock(output):
        refuse_existing(output)
        opened = open_trace(trace)
        info = opened.info
        ids = opened.load("ids", domain)
        if after is not None:
            trained = open_trace(after)
            check_same_rows(opened, trained)
            later = trained.load("ids", domain)
            relevance = gained_relevance(ids, later, info.num_experts, info.layers)
        elif score is Score.gate:
            weights = opened.load("weights", domain)
            relevance = expert_relevance(ids, weights, info.num_experts, "gate")
        elif score is Score.reap:
            _require_norms(opened)
            weights, norms = (opened.load(field, domain) for field in ("weights", "norms"))
            relevance = reap_relevance(ids, weights, norms, info.num_experts)
        else:
            relevance = expert_relevance(ids, None, info.num_experts)
        if kept_share is not None:
            groups = _groups(opened)
            chosen = kept_experts(relevance, kept_share, groups.groups)
            if problem := groups.problem(chosen[0], info.num_experts):
                raise typer.BadParameter(f"--keep {keep}: {problem}")
        elif share is not None:
            chosen = top_experts(relevance, share)
        else:
            assert top_p is not None
            chosen = top_p_experts(relevance, top_p)
        selection = ExpertSelection(
            experts=dict(zip(info.layers, chosen, strict=True)),
            model_type=info.model_type,
            num_experts=info.num_experts,
            score=score.value,
            top_p=top_p,
            top=share,
            keep=kept_share,
        )
        selection.write(output)
    domains = [domain] if domain else list(info.domains)
    mixed = " (mixed; --domain NAME selects for one)" if len(domains) > 1 else ""
    print(f"domains: {', '.join(domains)}{mixed}")
    experts = counted(sum(map(len, chosen)), "expert")
    print(f"{experts} in {counted(len(chosen), 'layer')}: {output}")
    carried = sum(row[ids].sum() for row, ids in zip(relevance, chosen, strict=True))
    print(f"they have {carried / len(chosen):.0%} of the {score.value} score")


def _require_norms(trace: RoutingTrace) -> None:
    from moe_finetune.errors import TraceError

    if not trace.has("norms"):
        raise TraceError(
            f"{trace.path}: has no lengths of the experts' outputs, which --score reap reads; "
            "record it with 'moe-finetune analyze CHECKPOINT --data FILE --norms'"
        )


def _groups(trace: RoutingTrace) -> ExpertGroups:
    """The groups of experts that the traced model's routers select from."""
    from moe_finetune.errors import TraceError
    from moe_finetune.models import find_family
    from moe_finetune.models.expert_groups import ExpertGroups

    info = trace.info
    if info.groups is None:
        raise TraceError(
            f"{trace.path}: does not say which groups the experts lie in, which --keep needs; "
            "record it again with 'moe-finetune analyze'"
        )
    family = find_family(info.model_type)
    return ExpertGroups.made(*info.groups, info.top_k, "" if family is None else family.score)


def _share(option: str, text: str) -> float:
    """A share as ``25%`` or ``0.25``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise typer.BadParameter(
            f"{option} {text}: must be a share such as 25% or 0.25, up to 100%"
        )
    return value


@app.command()
def prune(
    base: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")],
    output: Output,
    experts: Annotated[
        Path, typer.Option("--experts", help="The experts to keep, from `select --keep`.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
) -> None:
    """Write a smaller checkpoint with only some of the experts.

    Example: moe-finetune prune ./my-moe --experts kept.json --output ./my-moe-75
    """
    from moe_finetune.cli.missing import refuse_no_path
    from moe_finetune.errors import DataError
    from moe_finetune.models.config_and_tokenizer import existing_folder

    existing_folder(checkpoint_in(base))
    refuse_no_path(experts, DataError, "no such file; write one with 'moe-finetune select'")
    if not dry_run:
        check_output(output)
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.checkpoint.prune import prune_experts
    from moe_finetune.io.checkpoint_files import PRUNED
    from moe_finetune.lora.select import ExpertSelection
    from moe_finetune.models.config_and_tokenizer import local_folder

    selection = ExpertSelection.read(experts)
    opened = open_checkpoint(local_folder(checkpoint_in(base)), stored=True)
    places = opened.places
    pruned = (opened.folder / PRUNED).is_file()
    selection.check(opened.family.model_type, places.moe_layers, places.num_experts, pruned)
    pruning = prune_experts(
        opened,
        selection.experts,
        output,
        name=base,
        chosen_by=selection.score,
        dry_run=dry_run,
    )
    print(pruning.text() if dry_run else f"pruned: {output}\n{pruning.text()}")
