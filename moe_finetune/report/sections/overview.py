"""At a glance: what ran, what came out of it, how the routing changed."""

from __future__ import annotations

import math

from moe_finetune.metrics.words import word
from moe_finetune.report.charts.intervals import forest
from moe_finetune.report.compare import Difference, difference
from moe_finetune.report.context import Report, Section, group, listed
from moe_finetune.report.markup import DASH, Markup, duration, is_number, join, number, tag
from moe_finetune.report.numbers import ends
from moe_finetune.report.runs import Run

VERDICTS = {
    "better": ("▲", "better"),
    "worse": ("▼", "worse"),
    "unclear": ("●", "no clear difference"),
    "unknown": ("○", "no interval"),
}
CARDS = 9  # benchmarks shown here; the section Scores has all
ROUTING = ("max_violation", "load_entropy", "routing_entropy", "entropy", "score_variance",
           "expert_overlap", "router_cosine")  # fmt: skip


def _render(report: Report) -> Markup:
    parts: list[Markup | None] = [
        tag("p", _lede(report), class_="lede"),
        tag("div", [_run_card(report, run) for run in report.runs], class_="cards runs"),
        _benchmarks(report),
        _routing(report),
    ]
    return join(parts)


def _comparisons(report: Report) -> list[tuple[str, Run, Difference]]:
    """Return task, run and difference: against the baseline run, or against the base checkpoint."""
    found = []
    for run in report.runs:
        against = report.baseline.scores if report.baseline else run.base_scores
        if run is report.baseline:
            continue
        for task, score in run.scores.items():
            if task in against:
                found.append((task, run, difference(against[task], score)))
    return found


def _lede(report: Report) -> Markup:
    """Say in one or two sentences what came out."""
    baseline = report.baseline
    sentences: list[object] = []
    compared = _comparisons(report)
    for run in report.runs:
        mine = [delta for _, r, delta in compared if r is run]
        if run is baseline or not mine:
            continue
        against = baseline.label if baseline else "the checkpoint before fine-tuning"
        counts = {v: sum(d.verdict == v for d in mine) for v in VERDICTS}
        words = [f"{VERDICTS[v][1]} on {n}" for v, n in counts.items() if n]
        total = f"{len(mine)} benchmark{'s' if len(mine) > 1 else ''}"
        sentences.append(
            join([tag("strong", run.label), f" against {against}, {total}: {', '.join(words)}. "])
        )
    if not sentences:
        sentences += [_training(run) for run in report.runs]
    sentences.append(_evenness(report))
    return join(sentences)


def _training(run: Run) -> Markup:
    """Say how far the loss came, for runs that nothing is compared with."""
    curve = run.curves.get("loss")
    if curve is None:
        return join([tag("strong", run.label), ": no training was logged. "])
    start, end = ends(curve)
    told = (
        f": training loss {number(start)} → {number(end)} by step {number(int(curve.steps[-1]))}. "
    )
    return join([tag("strong", run.label), told])


def _violations(report: Report) -> list[float]:
    """Return the mean MaxVio of every snapshot."""
    return [shot.routing.metrics()["max_violation"].mean for shot in report.snapshots()]


def _evenness(report: Report) -> str | None:
    """Say how the load's evenness changed, run by run."""
    pairs: list[tuple[Run, float, float]] = []
    for run in report.runs:
        if run.before is not None and run.after is not None:
            before, after = (r.metrics()["max_violation"].mean for r in (run.before, run.after))
            pairs.append((run, before, after))
    if not pairs:
        return None
    if len(pairs) == 1:
        _, before, after = pairs[0]
        return f"{_verb(before, after)} (MaxVio {number(before)} → {number(after)})."
    return f"MaxVio, the load's unevenness: {listed(report.snapshots(), _violations(report))}."


def _verb(before: float, after: float) -> str:
    if math.isnan(before + after) or abs(after - before) <= 0.02 * abs(before):
        return "Load stayed as even as it was"
    return "Load became more even" if after < before else "Load became less even"


def _run_card(report: Report, run: Run) -> Markup:
    facts = [
        ("Checkpoint", run.model),
        ("Method", run.method),
        ("Steps", number(int(run.last_step)) if run.last_step is not None else None),
        ("Trained on", _tokens(run)),
        ("Time", _time(run)),
        ("Hardware", _hardware(run)),
        ("Evaluated in", run.evaluation.get("backend")),
    ]
    rows = [
        tag("div", tag("dt", name), tag("dd", value if value is not None else DASH))
        for name, value in facts
    ]
    badge = tag("span", "baseline", class_="badge") if run is report.baseline else None
    return tag(
        "article",
        tag("h3", report.swatch(run), badge),
        tag("dl", rows),
        class_="card run",
        style=f"--c:{report.color(run)}",
    )


def _tokens(run: Run) -> str | None:
    curve = run.curves.get("num_tokens")
    if curve is None or not math.isfinite(curve.values[-1]):
        return None
    return f"{number(round(curve.values[-1]))} tokens"


def _hardware(run: Run) -> str | None:
    accelerators = run.environment.get("accelerators")
    if accelerators:
        names = dict.fromkeys(accelerators)
        return ", ".join(f"{accelerators.count(name)} × {name}" for name in names)
    processor, cores = run.environment.get("processor"), run.environment.get("cores")
    return f"{processor}, {cores} cores" if processor and cores else processor


def _time(run: Run) -> str | None:
    seconds = run.summary.get("seconds")
    return duration(seconds) if is_number(seconds) else None


def _benchmarks(report: Report) -> Markup | None:
    compared = _comparisons(report)
    if not compared:
        return None
    tasks = list(dict.fromkeys(task for task, _, _ in compared))
    if len(tasks) > CARDS:
        size = {t: max(_size(d) for task, _, d in compared if task == t) for t in tasks}
        tasks = sorted(tasks, key=lambda t: -size[t])[:CARDS]
    cards = [_benchmark_card(report, task, compared) for task in tasks]
    against = f"“{report.baseline.label}”" if report.baseline else "before fine-tuning"
    more = (
        " The largest differences are shown; the table below has all."
        if (len({t for t, _, _ in compared}) > len(tasks))
        else ""
    )
    return group(
        "Benchmarks",
        tag("div", cards, class_="cards"),
        intro=f"Differences from {against} with 95 % intervals. An interval that crosses the "
        f"middle line leaves open which one is better.{more}",
    )


def _size(delta: Difference) -> float:
    return abs(delta.value) if math.isfinite(delta.value) else 0.0


def _benchmark_card(
    report: Report, task: str, compared: list[tuple[str, Run, Difference]]
) -> Markup:
    mine = [(run, delta) for t, run, delta in compared if t == task]
    ends = [abs(e) for _, d in mine for e in (d.value, d.low, d.high) if math.isfinite(e)]
    reach = 1.12 * max(ends, default=1.0) or 1.0
    rows = []
    for run, delta in mine:
        against = report.baseline.scores if report.baseline else run.base_scores
        icon, verdict = VERDICTS[delta.verdict]
        picture = forest(
            f"{task}: {run.label} {delta.text()}",
            f"95 % interval {delta.interval_text()}: {verdict}",
            delta.value, delta.low, delta.high, reach, report.color(run),
        )  # fmt: skip
        values = f"{against[task].text()} → {run.scores[task].text()}"
        rows.append(
            tag(
                "li",
                report.swatch(run) if len(report.runs) > 2 else None,
                tag("div", tag("span", delta.text(), class_="big"),
                    tag("span", values, class_="note"), class_="headline"),
                picture,
                tag("div", tag("span", f"{icon} {verdict}", class_=f"verdict {delta.verdict}"),
                    tag("span", delta.interval_text(), class_="note"), class_="under"),
            )
        )  # fmt: skip
    metric = mine[0][0].scores[task].metric.replace("_", " ")
    head = tag("h4", task, tag("span", metric, class_="note"))
    return tag("article", head, tag("ul", rows, class_="plain"), class_="card benchmark")


def _routing(report: Report) -> Markup | None:
    names = [
        name
        for name in ROUTING
        if any(run.after is not None and name in run.after.metrics() for run in report.runs)
    ]
    if not names:
        return None
    cards = []
    for name in names:
        rows = []
        for run in report.runs:
            before = run.before.metrics().get(name) if run.before else None
            after = run.after.metrics().get(name) if run.after else None
            if after is None:
                continue
            start = f"{number(before.mean)} → " if before else ""
            rows.append(
                tag(
                    "li",
                    report.swatch(run) if len(report.runs) > 1 else None,
                    tag(
                        "span", tag("span", start, class_="from"), number(after.mean), class_="big"
                    ),
                )
            )
        about = word(f"routing/{name}")
        head = tag("h4", about.name, tag("span", about.meaning, class_="note"))
        cards.append(tag("article", head, tag("ul", rows, class_="plain"), class_="card metric"))
    return group(
        "Routing",
        tag("div", cards, class_="cards small"),
        intro="Mean over layers, before → after fine-tuning.",
    )


OVERVIEW = Section("overview", "At a glance", _render)
