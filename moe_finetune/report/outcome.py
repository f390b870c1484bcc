"""What a run ends with: its scores, what changed in the experts, and what to do next."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RESULTS_FILE, RunFolder, read_log
from moe_finetune.io.tables import aligned
from moe_finetune.io.terminal import finite, terminal
from moe_finetune.report.context import Report
from moe_finetune.report.runs import read_runs
from moe_finetune.report.sections.answer import answer_text

WIDTH = 100

CHANGES = {
    "expert_overlap": "expert overlap",
    "score_variance": "score variance",
    "max_violation": "MaxVio",
    "entropy": "routing entropy",
}
"""Metrics of ``routing/*.json`` that a run ends with."""


def outcome(runs: Mapping[str, Path], base: Path | None = None) -> dict[str, Any]:
    """Scores and changes of runs as plain values.

    Args:
        runs: label -> a run's folder.
        base: the folder with ``results.json`` of the checkpoint before training.

    Returns ``scores`` (task -> label -> value, stderr, n, metric) and ``changes`` (label -> metric
    -> before, after, on the sample that ``routing/`` measures). For what the trainer logs, before
    and after are the first and the last log, and ``step`` is the first one's: 0 is before training.
    """
    scores: dict[str, dict[str, Any]] = {}
    places = {label: RunFolder(run).evaluation for label, run in runs.items()}
    if base:
        places = {"base": base} | places
    for label, folder in places.items():
        for task, found in _read(folder / RESULTS_FILE).get("tasks", {}).items():
            held = {key: found[key] for key in ("value", "stderr", "n", "metric")}
            scores.setdefault(task, {})[label] = held
    return {"scores": scores, "changes": {label: _changes(run) for label, run in runs.items()}}


# What the trainer logs of a stage's objective.
LOGGED = {
    "loss": "training loss",
    "eval_loss": "validation loss",
    "reward": "reward",
    "eval_reward": "validation reward",
    "rewards/accuracies": "preference accuracy",
    "eval_rewards/accuracies": "validation preference accuracy",
    "rewards/margins": "reward margin",
    "eval_rewards/margins": "validation reward margin",
}


def _changes(run: Path) -> dict[str, dict[str, float]]:
    changes: dict[str, dict[str, float]] = {}
    folder = RunFolder(run)
    before, after = (
        _read(path).get("metrics", {}) for path in (folder.routing_before, folder.routing_after)
    )
    for key in CHANGES:
        pair = [found.get(key, {}).get("mean") for found in (before, after)]
        if None not in pair:
            changes[key] = {"before": pair[0], "after": pair[1]}
    rows = read_log(folder.metrics)
    for key in LOGGED:
        logged = [row for row in rows if isinstance(row.get(key), int | float)]
        if logged:
            first, last = logged[0], logged[-1]
            changes[key] = {"before": first[key], "after": last[key], "step": first["step"]}
    if "reward" in changes:  # the loss of a policy gradient is near 0 whatever is learned
        changes.pop("loss", None)
        changes.pop("eval_loss", None)
    return changes


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, MoeFinetuneError, "delete it", finite=False) if path.is_file() else {}


def outcome_text(found: Mapping[str, Any]) -> str:
    """The tables of :func:`outcome` for a reader; empty where nothing was measured."""
    parts = [_score_table(found["scores"]), _change_table(found["changes"])]
    return "\n\n".join(part for part in parts if part)


def _score_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    labels = list(dict.fromkeys(label for row in scores.values() for label in row))
    if not labels:
        return ""
    rows = [["scores", "n", *labels]]
    for task, row in scores.items():
        any_one = next(iter(row.values()))
        cells = [_score(row.get(label)) for label in labels]
        rows.append([f"{task} ({any_one['metric']})", str(any_one["n"]), *cells])
    return aligned(rows)


def _score(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    if found["value"] is None:
        return "not scored"
    error = f" ± {found['stderr']:.3f}" if found["stderr"] is not None else ""
    return f"{found['value']:.3f}{error}"


def _change_table(changes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    names = CHANGES | LOGGED
    rows = []
    for key, name in names.items():
        pairs = [change[key] for change in changes.values() if key in change]
        if not pairs:
            continue
        step = max(pair.get("step", 0) for pair in pairs)
        shared = len({f"{pair['before']:.4g}" for pair in pairs}) == 1
        rows.append([
            f"{name}, first log (step {step:g}) and last" if step else name,
            f"{pairs[0]['before']:.4g}" if shared else "differs",
            *(_after(change.get(key), shared) for change in changes.values()),
        ])  # fmt: skip
    if not rows:
        return ""
    labels = ["after"] if len(changes) == 1 else [f"after {label}" for label in changes]
    return aligned([["what training changed", "before", *labels], *rows])


def _after(pair: Mapping[str, float] | None, shared_start: bool) -> str:
    if pair is None:
        return "–"
    before, after = pair["before"], pair["after"]
    notes = [] if shared_start else [f"from {before:.4g}"]
    if before and math.isfinite(before) and math.isfinite(after):
        share = 100 * (after - before) / abs(before)
        notes.append(f"{share:+.{0 if abs(share) >= 10 else 1}f} %")
    return f"{after:.4g} ({', '.join(notes)})" if notes else f"{after:.4g}"


def end_run(runs: Mapping[str, Path], base: Path | None, following: str) -> None:
    """Print what the runs came to on standard output; as JSON where the terminal speaks that."""
    labels = list(runs) if len(runs) > 1 else None  # one run is called by its folder
    report = Report(read_runs(runs.values(), labels), "")
    found, shown = outcome(runs, base) | {"answer": answer_text(report)}, terminal()
    if shown.style == "json":
        print(json.dumps(finite(found)))
        return
    if text := outcome_text(found):
        print(f"\n{text}")
    for paragraph in found["answer"]:
        print("\n" + textwrap.fill(paragraph, WIDTH))
    if not shown.quiet:
        print(f"\n{following}")


def next_commands(page: Path | None, run: Path, own: Sequence[str] = ()) -> str:
    """Commands that a user would want next; ``own`` is one that starts on the user's own data."""
    opener = "open" if sys.platform == "darwin" else shutil.which("xdg-open") and "xdg-open"
    lines = []
    if page is not None and page.is_file():
        words = [opener] if opener else ["python", "-m", "webbrowser"]
        lines.append(("look at the page", [*words, str(page)]))
    if RunFolder(run).merged.is_dir():
        lines.append(("talk to the model", ["moe-finetune", "chat", str(run)]))
        lines.append(("serve it", ["moe-finetune", "serve", str(run)]))
    if own:
        lines.append(("train on your own data", ["moe-finetune", *own]))
    shown = [f"  {what:<24}{shlex.join(command)}" for what, command in lines]
    return "\n".join(["next:", *shown])
