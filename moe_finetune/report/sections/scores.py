"""Scores side by side: the table with differences, the intervals drawn, every metric."""

import math

from moe_finetune.evaluation.score import Score
from moe_finetune.report.charts.intervals import Dot, dot_plot, forest
from moe_finetune.report.context import (
    BEFORE,
    Cell,
    Report,
    Section,
    figure,
    folded,
    swatch,
    table,
)
from moe_finetune.report.markup import DASH, Markup, breakable, join, number, tag
from moe_finetune.report.score_differences import SIGNS, Difference, score_text, verdict_mark


def _render(report: Report) -> Markup | None:
    if not any(run.scores for run in report.runs):
        report.note_missing(
            "Scores", "evaluate the run: `moe-finetune eval RUN/merged --output RUN/eval`"
        )
        return None
    for run in report.runs:
        if not run.scores:
            report.note_missing(f"Scores of {run.label}", "no eval/results.json in its folder")
    if not any(run.base_scores for run in report.runs):
        report.note_missing(
            "Scores before fine-tuning",
            "set `evaluation.base: true`, or `moe-finetune eval BASE --output RUN/eval_base`",
        )
    return join([_pictures(report), _every_metric(report), _remarks(report)])


def baseline_label(report: Report) -> str:
    """The reference of the comparison, worded for a sentence."""
    return report.baseline.label if report.baseline else "the checkpoint before fine-tuning"


def score_table(report: Report) -> Markup | None:
    """Differences with their intervals, then every score with its standard error."""
    if not any(run.scores for run in report.runs):
        return None
    base = report.baseline
    has_base = any(run.base_scores for run in report.runs)
    compared = [
        (run, differences) for run in report.runs[bool(base) :]
        if (differences := report.against_baseline(run))
    ]  # fmt: skip
    columns: list[Cell] = [
        "Benchmark",
        *(join([report.swatch(run), f"\u00a0− {base.label if base else 'before'}"])
          for run, _ in compared),
        *(["Before"] if has_base else []),
        *(report.swatch(run) for run in report.runs),
        "Items",
        "Chance",
    ]  # fmt: skip
    rows, keys = [], []
    for task in _tasks(report):
        any_score = _any_score(report, task)
        scores = [_before(report, task)] if has_base else []
        scores += [run.scores.get(task) for run in report.runs]
        row_deltas = [differences.get(task) for _, differences in compared]
        ends = [end for d in row_deltas if d for end in (d.low, d.high, d.value) if end == end]
        reach = max(map(abs, ends), default=1.0)
        rows.append([
            join([breakable(task), tag("span", any_score.metric.replace("_", " "), class_="note")]),
            *(_difference(f"{task}: {run.label}", d, reach, report.color(run))
              for (run, _), d in zip(compared, row_deltas, strict=True)),
            *map(_cell, scores),
            number(any_score.n),
            score_text(any_score, any_score.chance),
        ])  # fmt: skip
        values = [x.value if x else math.nan for x in (*row_deltas, *scores)]
        values += [math.nan if any_score.n is None else any_score.n, any_score.chance]
        keys.append([task, *(None if math.isnan(v) else v for v in values)])
    caption = ("Differences with 95 % intervals, " if compared else "") + "scores"
    grid = table(f"{caption[0].upper()}{caption[1:]} with standard errors", columns, rows,
                 sortable=True, keys=keys)  # fmt: skip
    deltas = [delta for _, differences in compared for delta in differences.values()]
    return join([grid, _note(deltas, report.comparisons)])


def _cell(score: Score | None) -> Cell:
    if score is None or math.isnan(score.value):
        return DASH
    if math.isnan(score.stderr):
        return score_text(score)
    error = f"{100 * score.stderr:.1f}" if score.is_share else number(score.stderr, 2)
    return join([score_text(score), tag("span", f"± {error}", class_="note")])


def _difference(title: str, delta: Difference | None, reach: float, color: str) -> Cell:
    if delta is None:
        return DASH
    words = f"{delta.text()}, {delta.interval_text()}: {SIGNS[delta.verdict][2:]}"
    return join([
        f"{delta.text()} ",
        tag("small", delta.interval_text()),
        forest(title, words, delta.value, delta.low, delta.high, 1.12 * reach or 1.0, color),
        verdict_mark(delta.verdict),
    ])  # fmt: skip


def _note(deltas: list[Difference], family: int) -> Markup:
    paired = sum(delta.paired for delta in deltas)
    if not deltas:
        return tag("p", "± is the standard error.", class_="note")
    how = {
        0: "The runs are compared as independent samples (Newcombe's interval for shares of "
        "items, otherwise a normal one).",
        len(deltas): "The runs answered the same prompts and are compared item by item: a "
        "bootstrap interval, and McNemar's exact test where an item is right or wrong.",
    }
    mixed = (
        f"{paired} of {len(deltas)} comparisons are item by item (bootstrap interval, McNemar's "
        "exact test); the others treat the runs as independent samples."
    )
    return tag(
        "p",
        "± is the standard error, pp are percentage points. If an interval crosses the middle "
        "line, the difference is not statistically significant. Intervals are of one difference; "
        f"better and worse are corrected for the {family} differences on this page (Holm), so an "
        "interval may exclude 0 without such a word. ",
        how.get(paired, mixed),
        class_="note",
    )


def _tasks(report: Report) -> list[str]:
    return list(dict.fromkeys(task for run in report.runs for task in run.scores))


def _before(report: Report, task: str) -> Score | None:
    return next((r.base_scores[task] for r in report.runs if task in r.base_scores), None)


def _any_score(report: Report, task: str) -> Score:
    return next(run.scores[task] for run in report.runs if task in run.scores)


def _pictures(report: Report) -> Markup:
    """Shares of items on one axis in percent; every other metric on its own axis."""
    tasks = _tasks(report)
    shares = [task for task in tasks if _any_score(report, task).is_share]
    figures = [_picture(report, shares, "score, %", 100.0)] if shares else []
    others = [task for task in tasks if task not in shares]
    for metric in dict.fromkeys(_any_score(report, task).metric for task in others):
        alike = [t for t in others if _any_score(report, t).metric == metric]
        figures.append(_picture(report, alike, metric.replace("_", " ") or "score", 1.0))
    return tag("div", figures, class_="pair" if len(figures) > 1 else None)


def _picture(report: Report, tasks: list[str], label: str, scale: float) -> Markup:
    rows = []
    for task in tasks:
        base_score, any_score = _before(report, task), _any_score(report, task)
        dots = [_dot("before fine-tuning", base_score, BEFORE, hollow=True)] if base_score else []
        holders = [run for run in report.runs if task in run.scores]
        dots += [_dot(run.label, run.scores[task], report.color(run)) for run in holders]
        rows.append((task, dots, any_score.chance))
    summary = "; ".join(f"{name}: {', '.join(d.text for d in dots)}" for name, dots, _ in rows)
    picture = dot_plot("Scores with 95 % intervals", summary, rows, x_label=label, scale=scale)
    legend = [tag("li", report.swatch(run)) for run in report.runs]
    if any(_before(report, t) for t in tasks):
        legend.insert(0, tag("li", swatch("before fine-tuning", BEFORE, hollow=True)))
    if any(math.isfinite(chance) for _, _, chance in rows):
        legend.append(tag("li", tag("span", class_="tick-mark", aria_hidden="true"), "chance"))
    names = ", ".join(run.label for run in report.runs)
    what = "Scores in %" if scale == 100 else label[:1].upper() + label[1:]
    title = f"{what} of {names}, with 95 % intervals"
    return figure(title, tag("ul", legend, class_="key"), picture)


def _dot(label: str, score: Score, color: str, hollow: bool = False) -> Dot:
    low, high = score.interval() or (math.nan, math.nan)
    text = f"{label} {score_text(score)}"
    if math.isfinite(low):
        text += f" [{score_text(score, low)}, {score_text(score, high)}]"
    return Dot(score.value, low, high, color, text, hollow)


def _every_metric(report: Report) -> Markup | None:
    rows: list[list[Cell]] = []
    for task in _tasks(report):
        metrics = [run.scores[task].others if task in run.scores else {} for run in report.runs]
        for name in dict.fromkeys(name for others in metrics for name in others):
            row: list[Cell] = [task, name]
            for others in metrics:
                value, stderr = others.get(name, (math.nan, math.nan))
                error = "" if math.isnan(stderr) else f" ± {number(stderr, 2)}"
                row.append(f"{number(value)}{error}")
            rows.append(row)
    if len(rows) <= len(_tasks(report)):
        return None
    columns: list[Cell] = ["Benchmark", "Metric", *(report.swatch(run) for run in report.runs)]
    return folded("Every metric", table("Every metric", columns, rows))


def _remarks(report: Report) -> Markup | None:
    """Remarks from the evaluations: truncated prompts, unfinished tasks."""
    remarks = []
    for run in report.runs:
        unfinished = ", ".join(map(str, run.evaluation.get("unfinished") or []))
        if run.evaluation.get("complete") is False:
            remarks.append((run.label, f"not complete; unfinished: {unfinished}"))
        remarks += [(run.label, str(note)) for note in run.evaluation.get("notes") or []]
        if external := run.evaluation.get("suite", {}).get("external"):
            remarks.append((run.label, external))
        remarks += [(f"{run.label}, {t}", note) for t, s in run.scores.items() for note in s.notes]
    if not remarks:
        return None
    entries = [tag("li", tag("strong", where), f": {note}") for where, note in remarks]
    return tag("div", tag("h3", "Remarks"), tag("ul", entries, class_="missing"), class_="group")


SCORES = Section("scores", "Scores in detail", _render)
