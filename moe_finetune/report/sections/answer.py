"""The answer: what the losses changed in the experts, and what that did to the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe_finetune.metrics.words import word
from moe_finetune.report.compare import Difference
from moe_finetune.report.context import Report, Section, differ, folded, group
from moe_finetune.report.markup import DASH, Markup, duration, is_number, join, number, tag
from moe_finetune.report.numbers import ends
from moe_finetune.report.runs import Run
from moe_finetune.report.sections.experts import change_text, expert_metrics, experts_table, told
from moe_finetune.report.sections.scores import against, comparisons, score_table


def _render(report: Report) -> Markup | None:
    sentences = [
        tag("p", tag("strong", label), f"{compared}. {said}")
        for label, compared, said in answer(report)
    ]
    before = _since_before(report)
    notes = [tag("li", note) for note in _different_data(report)]
    return join(
        [
            tag("div", sentences, tag("p", before) if before else None, class_="lede"),
            tag("ul", notes, class_="warning") if notes else None,
            group("Scores", table) if (table := score_table(report)) else None,
            group("Experts", table) if (table := experts_table(report)) else None,
            folded("The runs", tag("div", [_run_card(report, r) for r in report.runs],
                                   class_="cards")),
        ]
    )  # fmt: skip


def answer(report: Report) -> list[tuple[str, str, str]]:
    """What each run but the baseline changed: its label, against what, and the sentences."""
    return [_sentences(report, run) for run in report.runs[1:] or report.runs]


def answer_text(report: Report) -> list[str]:
    """:func:`answer` as paragraphs, and what all runs did to the scores before fine-tuning."""
    said = ["".join((label, compared, ". ", text)) for label, compared, text in answer(report)]
    paragraphs = [*said, *filter(None, [_since_before(report)])]
    return [each.replace("\xa0", " ") for each in paragraphs]


def _sentences(report: Report, run: Run) -> tuple[str, str, str]:
    """Say what a run changed against the baseline, or against the checkpoint before it."""
    parts = [run.collapse, _experts(report, run), _scores(report, run), _objective(report, run)]
    compared = any(math.isfinite(m.share) for m in expert_metrics(report, run)) or parts[2]
    against_what = f" against {against(report)}" if compared else ""
    said = " ".join(part for part in parts if part) or "Nothing was measured."
    return run.label, against_what, said


def _experts(report: Report, run: Run) -> str | None:
    metrics = expert_metrics(report, run)
    said = [told(m) for m in metrics if m.moved] or [
        told(m) for m in metrics if not math.isfinite(m.share)
    ]
    if said:
        return f"In the experts, {_listed(said[:4])}."
    return "The experts hardly changed." if metrics else None


def _scores(report: Report, run: Run) -> str | None:
    found = comparisons(report, run)
    clear = _clear(found)
    unclear = [task for task, d in found if d.verdict in ("unclear", "unknown")]
    parts = [f"Its scores are {clear}"] if clear else []
    if unclear:
        named = _listed(unclear) if len(unclear) < 5 else f"{len(unclear)} benchmarks"
        start = "there is" if clear else "Its scores show"
        parts.append(f"{start} no clear difference on {named}")
    return f"{'; '.join(parts)}." if parts else None


def _clear(found: list[tuple[str, Difference]]) -> str | None:
    """What is better and what is worse, with intervals."""
    parts = []
    for verdict in ("better", "worse"):
        tasks = [_with_interval(task, d) for task, d in found if d.verdict == verdict]
        if tasks:
            parts.append(f"{verdict} on {_listed(tasks)}")
    return " and ".join(parts) or None


def _since_before(report: Report) -> str | None:
    """What all runs did to the scores of the checkpoint that they began with."""
    if report.baseline is None:
        return None
    said = []
    for run in report.runs:
        shared = [task for task in run.scores if task in run.base_scores]
        found = [(t, report.difference(run.base_scores[t], run.scores[t])) for t in shared]
        if found:
            said.append(f"{run.label} is {_clear(found) or 'not clearly different'}")
    return f"Against the checkpoint before fine-tuning, {'; '.join(said)}." if said else None


def _with_interval(task: str, delta: Difference) -> str:
    pairs = ", item by item" if delta.paired else ""
    return f"{task} ({delta.text()}, 95\xa0% interval {delta.interval_text()}{pairs})"


# What training aims at, by what its stage logs: GRPO's reward, the margin of preferences, the loss.
OBJECTIVES = (("reward",), ("rewards/accuracies", "rewards/margins"), ("loss",))


def _objective(report: Report, run: Run) -> str | None:
    """Say where the stage's objective ended: on validation data, or else in training."""
    for names in OBJECTIVES:
        sentences = [
            sentence
            for name in names
            if (sentence := _ended(report, run, f"eval_{name}") or _ended(report, run, name))
        ]
        if sentences:
            return " ".join(sentences)
    return None


def _ended(report: Report, run: Run, name: str) -> str | None:
    if name not in run.curves:
        return None
    title, base = word(name).name, report.baseline
    start, end = ends(run.curves[name])
    if base is None:
        return f"{title} went from {number(start)} to {number(end)}."
    if name not in base.curves:
        return None
    baseline_end = ends(base.curves[name])[1]
    if number(baseline_end) == number(end):
        return f"{title} ended at {number(end)} in both."
    change = change_text(baseline_end, end)
    return f"{title} ended at {number(end)} against {number(baseline_end)} ({change})."


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _different_data(report: Report) -> Iterator[str]:
    """Say where runs were measured on different data, so that their numbers do not compare."""
    runs = report.runs
    if differ(runs, lambda r: r.after and (r.after.data.get("data"), r.after.measured_on)):
        yield (
            "The routing of these runs was measured on different tokens: their routing metrics "
            "differ for that reason as well."
        )
    if differ(runs, lambda r: (r.recipe.get("data") or {}).get("validation")):
        yield ("These runs have different validation data: their validation losses do not compare.")
    suites = differ(runs, lambda r: (r.evaluation.get("suite") or {}).get("sha256"))
    unlike = [task for run in runs[1:] for task, d in comparisons(report, run) if d.other_items]
    if suites or unlike:
        named = f" ({', '.join(dict.fromkeys(unlike))})" if unlike else ""
        yield (
            f"These runs did not answer the same prompts{named}: their scores are compared as "
            "independent samples."
        )


def _run_card(report: Report, run: Run) -> Markup:
    steps, tokens = run.last_step, run.curves.get("num_tokens")
    seen = tokens.values[-1] if tokens else math.nan
    seconds = run.summary.get("seconds")
    facts = {
        "Checkpoint": run.model,
        "Method": run.method,
        "Steps": number(int(steps)) if steps is not None else None,
        "Trained on": f"{number(round(seen))} tokens" if math.isfinite(seen) else None,
        "Time": duration(seconds) if is_number(seconds) else None,
        "Hardware": _hardware(run),
        "Evaluated in": run.evaluation.get("backend"),
    }
    rows = [tag("div", tag("dt", k), tag("dd", v or DASH)) for k, v in facts.items()]
    badge = tag("span", "baseline", class_="badge") if run is report.baseline else None
    return tag(
        "article",
        tag("h4", report.swatch(run), badge),
        tag("dl", rows),
        class_="card run",
        style=f"--c:{report.color(run)}",
    )


def _hardware(run: Run) -> str | None:
    accelerators = run.environment.get("accelerators")
    if accelerators:
        names = dict.fromkeys(accelerators)
        return ", ".join(f"{accelerators.count(name)} × {name}" for name in names)
    processor, cores = run.environment.get("processor"), run.environment.get("cores")
    return f"{processor}, {cores} cores" if processor and cores else processor


ANSWER = Section("answer", "The answer", _render)
