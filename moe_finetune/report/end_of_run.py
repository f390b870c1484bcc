"""The outcome of a run: its scores, the changes in the experts, and the next commands."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_finetune.data.trained_form import CHAT, trained_form
from moe_finetune.evaluation.score import Score
from moe_finetune.io.next_commands import Line, listed, new_run, other_method, program
from moe_finetune.io.run_folder import RECIPE_FILE, RESULTS_FILE, RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.io.text_tables import aligned
from moe_finetune.report.context import Report
from moe_finetune.report.markup import DASH
from moe_finetune.report.read_runs import read_results, read_run, read_runs
from moe_finetune.report.sections.answer import answer_text

WIDTH = 100


def score_table(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """Scores by label as a table; empty if there are none."""
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


def end_run(runs: Mapping[str, Path], base: Path | None, following: str) -> None:
    """Print the results of runs (label -> folder) on standard output, then ``following`` commands.

    ``base`` has the results of the checkpoint before training; None if the runs have them.
    """
    labels = list(runs) if len(runs) > 1 else None  # a single run is named by its folder
    report = Report(read_runs(runs.values(), labels), "")
    answer = answer_text(report)
    scores = {"base": read_results(base / RESULTS_FILE)[1] if base else report.runs[0].base_scores}
    scores |= {label: run.scores for label, run in zip(runs, report.runs, strict=True)}
    if text := score_table(scores):
        print(f"\n{text}")
    for paragraph in answer:
        title, *findings = paragraph.splitlines()
        wrapped = [textwrap.fill(finding, WIDTH, initial_indent="  ", subsequent_indent="    ")
                   for finding in findings]  # fmt: skip
        print("\n" + "\n".join([title, *wrapped]))
    if not terminal().quiet:
        print(f"\n{following}")


def next_commands(
    page: Path | None, run: Path, start: Sequence[str] = (), more: Sequence[Line] = ()
) -> str:
    """Commands that a user may want next; ``start`` is a command for the user's own data."""
    has_screen = os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}  # a server has none
    opener = "xdg-open" if has_screen and shutil.which("xdg-open") else None
    if sys.platform == "darwin":
        opener = "open"
    lines: list[Line] = []
    if (run / "merged").is_dir() or (run / "adapter").is_dir():
        raw = [] if trained_form(RunFolder(run)) in (None, CHAT) else ["--raw"]
        lines.append(("ask it", [program(), "ask", str(run), "your question", *raw]))
    if page is not None and page.is_file():
        python = "python" if shutil.which("python") else sys.executable
        words = [python, "-m", "http.server", "--directory", str(page.parent)]
        if opener is not None:
            words = [opener, str(page)]
        lines.append(("look at the report", words))
    if (run / "merged").is_dir():
        lines.append(("serve it", [program(), "serve", str(run)]))
        asked = [program(), "verify", str(run), "--served", "http://127.0.0.1:8000"]
        lines.append(("check what is served", asked))
    if start:
        lines.append(("train on your own data", [program(), *start]))
    lines += more
    return listed(lines)


def second_run(run: Path, recipe: Sequence[str]) -> list[Line]:
    """The run to compare ``run`` with, and the report of both; only the report if it is there.

    Args:
        recipe: files and overrides that ``run`` was started with.
    """
    this = read_run(run, "")
    plain = this.method in (None, "none")
    for file in sorted(run.parent.glob(f"*/{RECIPE_FILE}")):
        other = read_run(file.parent, "")
        same = other.stage == this.stage and all(
            this.recipe.get(key) == other.recipe.get(key) for key in ("model", "data")
        )
        if same and (other.method in (None, "none")) is not plain:
            return other_method(recipe, this.stage, plain, str(run), str(file.parent))[1:]
    new = new_run(run.parent, str(run))
    return other_method(recipe, this.stage, plain, str(run), new)
