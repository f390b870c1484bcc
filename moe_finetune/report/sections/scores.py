"""Scores side by side: the table with differences, the intervals drawn, every metric."""

from __future__ import annotations

import math

from moe_finetune.evaluation.score import Score
from moe_finetune.report.charts.intervals import Dot, dot_plot, forest
from moe_finetune.report.compare import SIGNS, Difference, score_text, verdict_mark
from moe_finetune.report.context import BEFORE, Report, Section, figure, folded, swatch, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.runs import Run


def _render(report: Report) -> Markup | None:
    if not any(run.scores for run in report.runs):
        report.lacks("Scores", "evaluate the run: `moe-finetune eval RUN/merged --output RUN/eval`")
        return None
    for run in report.runs:
        if not run.scores:
            report.lacks(f"Scores of {run.label}", "no eval/results.json in its folder")
    if not any(run.base_scores for run in report.runs):
        report.lacks(
            "Scores before fine-tuning",
            "evaluate the base checkpoint into the run's folder `eval_base`",
        )
    return join([_pictures(report), _every_metric(report), _remarks(report)])


def against(report: Report) -> str:
    """What runs are compared with, for a sentence."""
    return report.baseline.label if report.baseline else "the checkpoint before fine-tuning"


def comparisons(report: Report, run: Run) -> list[tuple[str, Difference]]:
    """Every benchmark of ``run`` against the baseline run, or against before fine-tuning."""
    theirs = report.baseline.scores if report.baseline else run.base_scores
    shared = [task for task in run.scores if task in theirs]
    return [(task, report.difference(theirs[task], run.scores[task])) for task in shared]


def score_table(report: Report) -> Markup | None:
    """Return every score with its standard error, and the differences with their intervals."""
    if not any(run.scores for run in report.runs):
        return None
    has_base = any(run.base_scores for run in report.runs)
    compared = [
        (run, dict(found)) for run in report.runs[bool(report.baseline) :]
        if (found := comparisons(report, run))
    ]  # fmt: skip
    other = report.baseline.label if report.baseline else "before"
    columns: list[object] = [
        "Benchmark",
        *(["Before"] if has_base else []),
        *(report.swatch(run) for run in report.runs),
        *(join([report.swatch(run), f"\u00a0− {other}"]) for run, _ in compared),
        "Items",
        "Chance",
    ]
    rows, keys = [], []
    for task in _tasks(report):
        any_score = _any_score(report, task)
        scores = [_before(report, task)] if has_base else []
        scores += [run.scores.get(task) for run in report.runs]
        deltas = [found.get(task) for _, found in compared]
        reach = max((abs(e) for d in deltas if d for e in (d.low, d.high, d.value) if e == e),
                    default=1.0)  # fmt: skip
        rows.append([
            join([task, tag("span", any_score.metric.replace("_", " "), class_="note")]),
            *map(_cell, scores),
            *(_difference(f"{task}: {run.label}", d, reach, report.color(run))
              for (run, _), d in zip(compared, deltas, strict=True)),
            number(any_score.n),
            score_text(any_score, any_score.chance),
        ])  # fmt: skip
        values = [x.value if x else math.nan for x in (*scores, *deltas)]
        values += [math.nan if any_score.n is None else any_score.n, any_score.chance]
        keys.append([task, *(None if math.isnan(v) else v for v in values)])
    grid = table(
        "Scores with standard errors" + (", differences with 95 % intervals" if compared else ""),
        columns, rows, sortable=True, keys=keys,
    )  # fmt: skip
    return join([grid, _note([d for _, found in compared for d in found.values()])])


def _cell(score: Score | None) -> object:
    if score is None or math.isnan(score.value):
        return DASH
    if math.isnan(score.stderr):
        return score_text(score)
    error = f"{100 * score.stderr:.1f}" if score.is_share else number(score.stderr, 2)
    return join([score_text(score), tag("span", f"± {error}", class_="note")])


def _difference(title: str, delta: Difference | None, reach: float, color: str) -> object:
    if delta is None:
        return DASH
    said = f"{delta.text()}, {delta.interval_text()}: {SIGNS[delta.verdict][2:]}"
    return join(
        [
            f"{delta.text()} ",
            tag("small", delta.interval_text()),
            forest(title, said, delta.value, delta.low, delta.high, 1.12 * reach or 1.0, color),
            verdict_mark(delta.verdict),
        ]
    )


def _note(deltas: list[Difference]) -> Markup:
    paired = sum(delta.paired for delta in deltas)
    how = {
        0: "The runs are compared as independent samples (Newcombe's interval for shares of "
        "items, else a normal one).",
        len(deltas): "The runs answered the same prompts and are compared item by item: a "
        "bootstrap interval, and McNemar's exact test where an item is right or wrong.",
    }
    mixed = (
        f"{paired} of {len(deltas)} comparisons are item by item (bootstrap interval, McNemar's "
        "exact test); the others treat the runs as independent samples."
    )
    return tag(
        "p",
        "± is the standard error. ",
        "pp are percentage points. Intervals are not corrected for the number of benchmarks; one "
        "that crosses the middle line leaves open which is better. "
        if deltas
        else None,
        how.get(paired, mixed) if deltas else None,
        class_="note",
    )


def _tasks(report: Report) -> list[str]:
    return list(dict.fromkeys(task for run in report.runs for task in run.scores))


def _before(report: Report, task: str) -> Score | None:
    return next((r.base_scores[task] for r in report.runs if task in r.base_scores), None)


def _any_score(report: Report, task: str) -> Score:
    return next(run.scores[task] for run in report.runs if task in run.scores)


def _pictures(report: Report) -> Markup | None:
    shares = [t for t in _tasks(report) if _any_score(report, t).is_share]
    others = [t for t in _tasks(report) if t not in shares]
    figures = [_picture(report, shares, "score, %", 100.0)] if shares else []
    for metric in dict.fromkeys(_any_score(report, t).metric for t in others):
        tasks = [t for t in others if _any_score(report, t).metric == metric]
        figures.append(_picture(report, tasks, metric.replace("_", " ") or "score", 1.0))
    return tag("div", figures, class_="pair" if len(figures) > 1 else None)


def _picture(report: Report, tasks: list[str], label: str, scale: float) -> Markup:
    rows = []
    for task in tasks:
        dots = []
        before = _before(report, task)
        if before is not None:
            dots.append(_dot("before fine-tuning", before, BEFORE, hollow=True))
        dots += [
            _dot(run.label, run.scores[task], report.color(run))
            for run in report.runs
            if task in run.scores
        ]
        rows.append((task, dots, _any_score(report, task).chance))
    summary = "; ".join(f"{name}: {', '.join(d.text for d in dots)}" for name, dots, _ in rows)
    picture = dot_plot("Scores with 95 % intervals", summary, rows, x_label=label, scale=scale)
    legend = [tag("li", report.swatch(run)) for run in report.runs]
    if any(_before(report, t) for t in tasks):
        legend.insert(0, tag("li", swatch("before fine-tuning", BEFORE, hollow=True)))
    if any(math.isfinite(chance) for _, _, chance in rows):
        legend.append(tag("li", tag("span", class_="tick-mark", aria_hidden="true"), "chance"))
    names = ", ".join(run.label for run in report.runs)
    what = "Scores in %" if scale == 100 else label[:1].upper() + label[1:]
    title = f"{what} of {names}, each with its own 95 % interval"
    return figure(title, tag("ul", legend, class_="key"), picture)


def _dot(label: str, score: Score, color: str, hollow: bool = False) -> Dot:
    low, high = score.interval() or (math.nan, math.nan)
    between = (
        f" [{score_text(score, low)}, {score_text(score, high)}]" if math.isfinite(low) else ""
    )
    return Dot(score.value, low, high, color, f"{label} {score_text(score)}{between}", hollow)


def _every_metric(report: Report) -> Markup | None:
    rows: list[list[object]] = []
    for task in _tasks(report):
        names = dict.fromkeys(
            n for r in report.runs if task in r.scores for n in r.scores[task].others
        )
        for name in names:
            row: list[object] = [task, name]
            for run in report.runs:
                value, stderr = (
                    run.scores[task].others.get(name, (math.nan, math.nan))
                    if task in run.scores
                    else (math.nan, math.nan)
                )
                error = "" if math.isnan(stderr) else f" ± {number(stderr, 2)}"
                row.append(f"{number(value)}{error}")
            rows.append(row)
    if len(rows) <= len(_tasks(report)):
        return None
    columns: list[object] = ["Benchmark", "Metric", *(report.swatch(run) for run in report.runs)]
    return folded("Every metric", table("Every metric", columns, rows))


def _remarks(report: Report) -> Markup | None:
    """Show what the evaluations themselves remark: cut prompts, tasks left out."""
    found = []
    for run in report.runs:
        unfinished = run.evaluation.get("unfinished") or []
        if run.evaluation.get("complete") is False:
            found.append(
                (run.label, f"not complete; unfinished: {', '.join(map(str, unfinished))}")
            )
        found += [(run.label, str(note)) for note in run.evaluation.get("notes") or []]
        found += [(f"{run.label}, {t}", note) for t, s in run.scores.items() for note in s.notes]
    if not found:
        return None
    entries = [tag("li", tag("strong", where), f": {note}") for where, note in found]
    return tag("div", tag("h3", "Remarks"), tag("ul", entries, class_="missing"), class_="group")


SCORES = Section("scores", "Scores in detail", _render)
