"""The outcome of a run: its scores, the changes in the experts, and the next commands."""

import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_finetune.evaluation.score import Score
from moe_finetune.io.run_folder import RESULTS_FILE
from moe_finetune.io.tables import aligned
from moe_finetune.io.terminal import terminal
from moe_finetune.metrics.words import word
from moe_finetune.report.context import Report
from moe_finetune.report.markup import DASH
from moe_finetune.report.runs import Run, read_results, read_runs
from moe_finetune.report.sections.answer import answer_text

WIDTH = 100
PROGRAM = "moe-finetune"
CHANGES = ("expert_overlap", "score_variance", "max_violation", "entropy")
"""Routing metrics in the outcome of a run."""
LOGGED = tuple(
    head + name
    for name in ("loss", "reward", "rewards/accuracies", "rewards/margins")
    for head in ("", "eval_")
)
"""Logged values of a stage's objective."""

Changes = dict[str, dict[str, float]]
"""Metric -> ``before``, ``after`` and, for logged values, the ``step`` of the first log."""


def changes_of(run: Run) -> Changes:
    """Routing before and after on one sample, and the first and last log of the objective."""
    changes: Changes = {}
    if run.routing_before and run.routing_after:
        starts, ends = run.routing_before.metrics(), run.routing_after.metrics()
        for key in (key for key in CHANGES if key in starts and key in ends):
            pair = {"before": starts[key].mean, "after": ends[key].mean}
            if all(map(math.isfinite, pair.values())):
                changes[key] = pair
    for key in LOGGED:
        if curve := run.curves.get(key):
            first, last = curve.values[0], curve.values[-1]
            if key.endswith("rewards/accuracies") and curve.steps[0] <= 1:
                first = math.nan  # the policy still is the reference: every pair is a tie
            changes[key] = {"before": first, "after": last, "step": curve.steps[0]}
    if "reward" in changes:  # a policy gradient's loss stays near 0 whatever is learned
        changes.pop("loss", None)
        changes.pop("eval_loss", None)
    return changes


def outcome_text(runs: Mapping[str, Run], base: Mapping[str, Score]) -> str:
    """Tables of the scores and changes of runs as text; empty if nothing was measured.

    Args:
        runs: the runs by label.
        base: scores of the checkpoint before training.
    """
    scores = {"base": base, **{label: run.scores for label, run in runs.items()}}
    changes = {label: changes_of(run) for label, run in runs.items()}
    return "\n\n".join(filter(None, [_score_table(scores), _change_table(changes)]))


def _score_table(scores: Mapping[str, Mapping[str, Score]]) -> str:
    by_label = {label: by_task for label, by_task in scores.items() if by_task}
    if not by_label:
        return ""
    rows = [["scores", "n", *by_label]]
    for task in dict.fromkeys(task for by_task in by_label.values() for task in by_task):
        of_task = [by_task.get(task) for by_task in by_label.values()]
        one = next(score for score in of_task if score is not None)
        rows.append([f"{task} ({one.metric})", str(one.n), *map(_score, of_task)])
    return aligned(rows)


def _score(score: Score | None) -> str:
    if score is None:
        return DASH
    if math.isnan(score.value):
        return "not scored"
    error = "" if math.isnan(score.stderr) else f" ± {score.stderr:.3f}"
    return f"{score.value:.3f}{error}"


def _change_table(changes: Mapping[str, Changes]) -> str:
    rows = []
    for key in (*CHANGES, *LOGGED):
        name = word(key if key in LOGGED else f"routing/{key}").name
        pairs = [change[key] for change in changes.values() if key in change]
        if not pairs:
            continue
        step = max(pair.get("step", 0) for pair in pairs)
        shared = len({f"{pair['before']:.4g}" for pair in pairs}) == 1
        rows.append([
            f"{name}, first log (step {step:g}) and last" if step else name,
            _value(pairs[0]["before"]) if shared else "differs",
            *(_after(change.get(key), shared, "accuracies" in key) for change in changes.values()),
        ])  # fmt: skip
    if not rows:
        return ""
    labels = ["after"] if len(changes) == 1 else [f"after {label}" for label in changes]
    return aligned([["what training changed", "before", *labels], *rows])


def _value(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else DASH


def _after(pair: Mapping[str, float] | None, shared_start: bool, rate: bool = False) -> str:
    """The value after training; with its change in percent, unless it is a ``rate``."""
    if pair is None:
        return DASH
    start, end = pair["before"], pair["after"]
    notes = [] if shared_start else [f"from {_value(start)}"]
    if start and math.isfinite(start) and math.isfinite(end) and not rate:
        share = 100 * (end - start) / abs(start)
        notes.append(f"{share:+.{0 if abs(share) >= 10 else 1}f} %")
    return f"{end:.4g} ({', '.join(notes)})" if notes else f"{end:.4g}"


def end_run(runs: Mapping[str, Path], base: Path | None, following: str) -> None:
    """Print the results of runs on standard output.

    Args:
        runs: label -> a run's folder.
        base: folder with the results of the checkpoint before training; None if the runs have them.
        following: the next commands, see :func:`next_commands`.
    """
    labels = list(runs) if len(runs) > 1 else None  # a single run is named by its folder
    report = Report(read_runs(runs.values(), labels), "")
    by_label = dict(zip(runs, report.runs, strict=True))
    answer = answer_text(report)
    scores = read_results(base / RESULTS_FILE)[1] if base else report.runs[0].base_scores
    if text := outcome_text(by_label, scores):
        print(f"\n{text}")
    for paragraph in answer:
        title, *findings = paragraph.splitlines()
        wrapped = [textwrap.fill(finding, WIDTH, initial_indent="  ", subsequent_indent="    ")
                   for finding in findings]  # fmt: skip
        print("\n" + "\n".join([title, *wrapped]))
    if not terminal().quiet:
        print(f"\n{following}")


def next_commands(page: Path | None, run: Path, start: Sequence[str] = ()) -> str:
    """Commands that a user may want next; ``start`` is a command for the user's own data."""
    opener = "open" if sys.platform == "darwin" else shutil.which("xdg-open") and "xdg-open"
    lines = []
    if page is not None and page.is_file():
        python = "python" if shutil.which("python") else sys.executable
        words = [opener] if opener else [python, "-m", "webbrowser"]
        lines.append(("look at the report", [*words, str(page)]))
    if (run / "merged").is_dir():
        lines.append(("serve it", [program(), "serve", str(run)]))
    if start:
        lines.append(("train on your own data", [program(), *start]))
    return listed(lines)


def listed(commands: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Commands to paste, each after what it is for."""
    return "\n".join(["next:", *(f"  {what:<24}{shlex.join(words)}" for what, words in commands)])


def program() -> str:
    """How the user's shell starts this program: by its path where its folder is not on PATH."""
    called = sys.argv[0]
    by_path = os.sep in called and Path(called).name == PROGRAM
    return called if by_path and shutil.which(PROGRAM) is None else PROGRAM
