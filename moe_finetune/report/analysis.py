"""``analyze``: trace, numbers, snapshot and page of the routing of a checkpoint or trace.

The folder appears complete or not at all. It contains ``trace/`` (for a checkpoint),
``summary.json``, ``routing/after.json`` (what the report draws) and ``report/index.html``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.errors import DataError
from moe_finetune.io import check_output, one_writer, output_folder, write_atomic
from moe_finetune.io.run_folder import RunFolder, checkpoint_in
from moe_finetune.io.text_tables import aligned
from moe_finetune.metrics import top_choice
from moe_finetune.metrics.arrays import mean_known
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.routing.metrics_of_trace import summarize_trace
from moe_finetune.routing.snapshot_file import PASSAGE, PASSAGES, passage, routing_path, snapshot

if TYPE_CHECKING:
    from moe_finetune.routing.measures_of_model import Measures
    from moe_finetune.routing.trace import RoutingTrace


UNSHOWN = ("mutual_coherence", "below_barrier", "coupling_mass")
"""Measured, and not among a trace's metrics: the page has coherence of its own."""


def find_trace(path: str | Path) -> Path | None:
    """The trace at ``path``, or in a folder that ``analyze`` wrote; None if there is none."""
    path = Path(path)
    if path.is_file():
        return path if path.suffix == ".npz" else None
    folders = (path, path / "trace")
    return next((folder for folder in folders if (folder / "trace.json").is_file()), None)


def open_trace(path: str | Path) -> RoutingTrace:
    """Open a trace: its folder, an ``.npz``, or a folder that ``analyze`` wrote."""
    from moe_finetune.routing.trace import RoutingTrace

    return RoutingTrace.open(find_trace(path) or path)


@one_writer
def analyze(
    source: str | Path,
    output: str | Path,
    data: Mapping[str, Sequence[str]] | None = None,
    *,
    adapter: str | Path | None = None,
    limit: int | None = None,
    max_length: int = 2048,
    probabilities: bool = False,
    norms: bool = False,
    dtype: str = "auto",
) -> Path:
    """Analyze the routing of a checkpoint on ``data`` (files by domain), or of a trace; return the
    page.

    ``limit`` counts rows of each domain, longer ones are truncated to ``max_length`` tokens, and
    ``probabilities`` of all experts and ``norms`` of selected ones' outputs can be stored in the
    trace.
    """
    output, trace_path = Path(output), find_trace(source)
    if trace_path is not None and (data or adapter is not None or limit or probabilities or norms):
        raise DataError(
            f"{source} is a trace; remove --data and --adapter, which record a checkpoint"
        )
    if trace_path is None and Path(source).is_file():
        raise DataError(f"{source}: neither a checkpoint folder nor a trace (folder or .npz file)")
    if trace_path is None and not data:
        raise DataError(f"{source} is a checkpoint; give the text to record with --data FILE")
    check_output(output)
    if trace_path is None:
        source = checkpoint_in(source)
    else:
        with output_folder(output, 0) as folder:
            write_analysis(trace_path, folder, output)
        return RunFolder(output).page
    from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.models.config_and_tokenizer import load_tokenizer, local_folder
    from moe_finetune.routing.tracing_checkpoint import record

    base = open_checkpoint(local_folder(source), values=True)
    opened = None if adapter is None else check_adapter(adapter, base)
    tokenizer = load_tokenizer(source)
    sequences = {
        domain: read_sequences(files, tokenizer, limit, max_length)
        for domain, files in (data or {}).items()
    }
    with output_folder(output, 0) as folder:
        trace = folder / "trace"
        measures = record(base, str(source), trace, sequences, opened, probabilities, dtype, norms)
        write_analysis(trace, folder, output, measures, tokenizer)
    return RunFolder(output).page


def read_sequences(
    files: Sequence[str], tokenizer: Tokenizer, limit: int | None, max_length: int
) -> list[np.ndarray]:
    """Token ids of the first ``limit`` rows of ``files``, cut to ``max_length`` tokens."""
    from moe_finetune.data.row_forms import Former
    from moe_finetune.data.sources import read_rows
    from moe_finetune.data.tokenize import tokenize_row

    sequences: list[np.ndarray] = []
    for file in files:
        former = Former()
        for location, row in read_rows(file):
            if limit is not None and len(sequences) >= limit:
                break
            try:
                ids = tokenize_row(former(location, row), tokenizer, False).input_ids[:max_length]
            except DataError as error:
                message = str(error)
                named = message if message.startswith(location) else f"{location}: {message}"
                raise DataError(named) from error
            sequences.append(np.asarray(ids, np.int32))
    if not sequences:
        raise DataError(f"{', '.join(files)}: no rows; add at least one")
    return sequences


def write_analysis(
    trace: Path,
    folder: Path,
    output: Path,
    measures: Measures | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write summary, snapshot and page of a trace into ``folder``, which will be ``output``."""
    from moe_finetune.report.context import Report
    from moe_finetune.report.page import render_page
    from moe_finetune.report.read_runs import read_run
    from moe_finetune.routing.trace import RoutingTrace

    opened = RoutingTrace.open(trace)
    summary = summarize_trace(opened)
    arrays, coherence = summary.pop("arrays"), None
    if measures is not None:
        of_model = measures.per_layer()
        measured = {name: values for name, values in of_model.items() if name not in UNSHOWN}
        coherence = measures.coherence(of_model)
        summary["per_layer"] |= measured
        summary["mean"] |= {name: mean_known(values) for name, values in measured.items()}
    if trace.parent == folder:  # which has a temporary name
        summary["trace"]["path"] = str(output / trace.name)
    write_atomic(RunFolder(folder).summary, json.dumps(summary))
    picture = trace_snapshot(opened, summary, arrays, coherence, tokenizer)
    write_atomic(RunFolder(folder).routing_after, json.dumps(picture))
    run = replace(read_run(folder, output.resolve().name), path=output)
    title = f"Routing of {opened.info.checkpoint}"
    write_atomic(RunFolder(folder).page, render_page(Report([run], title)))


def trace_snapshot(
    trace: RoutingTrace,
    summary: dict[str, Any],
    arrays: dict[str, np.ndarray],
    coherence: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """The trace as a routing snapshot for the report."""
    info, middle = trace.info, len(trace.info.layers) // 2
    pairs_LEE = arrays["conditional_activation_LEE"]
    matrix_EE = pairs_LEE[middle] if middle + 1 < len(info.layers) else None
    tokens = summary["trace"]["domains"]
    counts_GLE = arrays["domain_shares_GLE"] * info.top_k
    text = trace.has("token_ids") and trace.has("weights")
    return snapshot(
        routing_path(info.layers, arrays["load_LE"], info.tokens, info.top_k, matrix_EE),
        summary["per_layer"],
        coherence,
        {
            name: np.rint(shares_LE * tokens[name]).astype(int)
            for name, shares_LE in zip(info.domains, counts_GLE, strict=True)
        },
        passages(trace, tokenizer, middle) if tokenizer is not None and text else None,
    )


def passages(trace: RoutingTrace, tokenizer: Tokenizer, row: int) -> list[dict[str, Any]]:
    """The start of each domain's first sequence, with the top expert of the ``row``-th layer."""
    texts: list[dict[str, Any]] = []
    domains = range(min(PASSAGES, len(trace.info.domains)))
    for chunk in trace.chunks("ids", "weights", "token_ids", "seq", "domain"):
        for domain in domains[len(texts) :]:
            of_domain = np.flatnonzero(chunk["domain"] == domain)
            if not len(of_domain):
                break
            first = of_domain[chunk["seq"][of_domain] == chunk["seq"][of_domain[0]]][:PASSAGE]
            index_TK = chunk["ids"][first][:, row]
            top_T = top_choice(index_TK, chunk["weights"][first][:, row])
            layer, name = trace.info.layers[row], trace.info.domains[domain]
            ids_T = chunk["token_ids"][first]
            texts.append(passage(tokenizer, layer, name, ids_T, top_T, index_TK))
    return texts


def comparison_text(a: Path, b: Path, comparison: Mapping[str, Any]) -> str:
    """The results of :func:`moe_finetune.routing.comparison.compare_traces` as text."""
    rows = [["mean over layers", "a", "b", "b - a", "interval"]]
    for name, row in comparison["metrics"].items():
        values = [f"{row['a']:.4g}", f"{row['b']:.4g}", f"{row['difference']:+.4g}"]
        rows.append([name, *values, f"[{row['low']:+.4g}, {row['high']:+.4g}]"])
    if stable := comparison["path_stability"]:
        interval = f"[{stable['low']:.4f}, {stable['high']:.4f}]"
        rows.append(["path stability", f"{stable['value']:.4f}", "", "", interval])
    sequences = "the same sequences" if comparison["paired"] else "different sequences"
    how = f"{100 * comparison['level']:g} %, {comparison['bootstrap']:,} bootstrap replicates"
    return f"a: {a}\nb: {b}\n{sequences}; intervals: {how}\n\n{aligned(rows)}"
