"""Scores side by side: intervals drawn, then the table."""

from __future__ import annotations

import math

from moe_finetune.report.charts.intervals import Dot, dot_plot
from moe_finetune.report.compare import Score, difference
from moe_finetune.report.context import BEFORE, Report, Section, figure, swatch, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.runs import Run

SIGNS = {
    "better": "▲ better",
    "worse": "▼ worse",
    "unclear": "● no clear difference",
    "unknown": "",
}


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
    parts = [_pictures(report), _table(report), _note(report)]
    return join([*parts, _every_metric(report), _remarks(report)])


def _tasks(report: Report) -> list[str]:
    return list(dict.fromkeys(task for run in report.runs for task in run.scores))


def _before(report: Report, task: str) -> Score | None:
    """Return the base checkpoint's score: the first run's that has one."""
    return next((r.base_scores[task] for r in report.runs if task in r.base_scores), None)


def _pictures(report: Report) -> Markup:
    """Shares on one axis; every other metric in a picture of its own scale."""
    shares = [t for t in _tasks(report) if _any_score(report, t).is_share]
    others = [t for t in _tasks(report) if t not in shares]
    figures = [_picture(report, shares, "score, %", 100.0)] if shares else []
    for metric in dict.fromkeys(_any_score(report, t).metric for t in others):
        tasks = [t for t in others if _any_score(report, t).metric == metric]
        figures.append(_picture(report, tasks, metric.replace("_", " ") or "score", 1.0))
    return tag("div", figures, class_="pair" if len(figures) > 1 else None)


def _any_score(report: Report, task: str) -> Score:
    return next(run.scores[task] for run in report.runs if task in run.scores)


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
    return figure(_title(report, tasks), tag("ul", legend, class_="key"), picture)


def _title(report: Report, tasks: list[str]) -> str:
    """Say how many benchmarks each run is clearly better or worse on, and than what."""
    against = report.baseline.label if report.baseline else "before fine-tuning"
    compared = report.runs[1:] if report.baseline else report.runs
    found = []
    for run in compared:
        pairs = [
            (base, run.scores[task])
            for task in tasks
            if task in run.scores
            and (
                base := report.baseline.scores.get(task)
                if report.baseline
                else _before(report, task)
            )
        ]
        verdicts = [difference(base, score).verdict for base, score in pairs]
        if verdicts:
            found.append((run.label, verdicts))
    if not found:
        run = compared[0]
        known = [f"{t} {run.scores[t].text()}" for t in tasks[:4] if t in run.scores]
        return f"{run.label}: {', '.join(known)}"
    if not any(v in ("better", "worse") for _, verdicts in found for v in verdicts):
        return f"No clear difference from {against}"
    parts = []
    for label, verdicts in found:
        if not {"better", "worse"} & set(verdicts):
            continue
        counts = [f"{w} on {verdicts.count(w)}" for w in ("better", "worse") if w in verdicts]
        parts.append(f"{label} {' and '.join(counts)} of {len(verdicts)}")
    return f"Clearly different from {against}: {'; '.join(parts)}"


def _dot(label: str, score: Score, color: str, hollow: bool = False) -> Dot:
    low, high = score.interval() or (math.nan, math.nan)
    between = f" [{score.text(low)}, {score.text(high)}]" if math.isfinite(low) else ""
    return Dot(score.value, low, high, color, f"{label} {score.text()}{between}", hollow)


def _table(report: Report) -> Markup:
    has_base = any(run.base_scores for run in report.runs)
    columns: list[object] = ["Benchmark"]
    if has_base:
        columns.append("Before fine-tuning")
    columns += [report.swatch(run) for run in report.runs]
    compared = report.runs[1:] if report.baseline else (report.runs if has_base else [])
    against = report.baseline.label if report.baseline else "before"
    columns += [join([report.swatch(run), f"\u00a0− {against}"]) for run in compared]
    columns += ["Items", "Chance"]
    rows, keys = [], []
    for task in _tasks(report):
        any_score, before = _any_score(report, task), _before(report, task)
        name = join([task, tag("span", any_score.metric.replace("_", " "), class_="note")])
        row: list[object] = [name]
        key: list[float | str | None] = [task]
        if has_base:
            row.append(_cell(before))
            key.append(_key(before.value) if before else None)
        for run in report.runs:
            score = run.scores.get(task)
            row.append(_cell(score))
            key.append(_key(score.value) if score else None)
        for run in compared:
            cell, value = _difference_cell(report, run, task, before)
            row.append(cell)
            key.append(value)
        row += [number(any_score.n), any_score.text(any_score.chance)]
        key += [any_score.n, _key(any_score.chance)]
        rows.append(row)
        keys.append(key)
    return table("Scores with standard errors", columns, rows, sortable=True, keys=keys)


def _key(value: float) -> float | None:
    return None if math.isnan(value) else value


def _cell(score: Score | None) -> object:
    if score is None or math.isnan(score.value):
        return DASH
    if math.isnan(score.stderr):
        return score.text()
    error = f"{100 * score.stderr:.1f}" if score.is_share else number(score.stderr, 2)
    return join([score.text(), tag("span", f"± {error}", class_="note")])


def _difference_cell(
    report: Report, run: Run, task: str, before: Score | None
) -> tuple[object, float | None]:
    base = report.baseline.scores.get(task) if report.baseline else before
    score = run.scores.get(task)
    if base is None or score is None:
        return DASH, None
    delta = difference(base, score)
    sign = SIGNS[delta.verdict]
    cell = join(
        [
            delta.text(),
            tag("span", delta.interval_text(), class_="note"),
            tag("span", "in pairs", class_="note") if delta.paired else None,
            tag("span", sign, class_=f"verdict {delta.verdict}") if sign else None,
        ]
    )
    return cell, _key(delta.value)


def _note(report: Report) -> Markup:
    return tag(
        "p",
        "± is the standard error. Intervals are 95 %, not corrected for the number of benchmarks. "
        "Runs that answered the same prompts are compared in pairs, item by item: a bootstrap "
        "interval, and McNemar's exact test where an item is right or wrong. Others are treated "
        "as independent (Newcombe's interval for shares of items, else normal). "
        "pp: percentage points.",
        class_="note",
    )


def _every_metric(report: Report) -> Markup | None:
    """List what the tasks measured besides their headline metric."""
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
    return tag("details", tag("summary", "Every metric"), table("Every metric", columns, rows))


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


SCORES = Section("scores", "Scores", _render)
