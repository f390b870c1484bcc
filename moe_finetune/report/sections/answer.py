"""The summary: what was learned, scores, what changed in the experts, load and cost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_finetune.evaluation.score import Score
from moe_finetune.io.counted import counted
from moe_finetune.io.terminal import duration
from moe_finetune.metrics.words import Word, word
from moe_finetune.report.context import Report, Section, differ, folded, group
from moe_finetune.report.markup import DASH, Markup, breakable, is_number, join, number, tag
from moe_finetune.report.read_runs import Run, ends, losses_compare
from moe_finetune.report.score_differences import Difference, score_text
from moe_finetune.report.sections.experts import (
    Change,
    expert_changes,
    experts_table,
    metric_names,
)
from moe_finetune.report.sections.goal import goal_text, goal_word
from moe_finetune.report.sections.scores import baseline_label, score_table
from moe_finetune.report.sections.settings import different_keys

SOME = 4
"""Names in a list before the number of the others."""
# The logged objective of each stage: a reward, the margin of preferences, or the loss.
OBJECTIVES = (("reward",), ("rewards/accuracies", "rewards/margins"), ("loss",))


@dataclass(frozen=True)
class Answer:
    """What a run changed: its name, its reference, and labeled findings."""

    run: str
    reference: str
    findings: list[tuple[str, str]]


def answers(report: Report) -> list[Answer]:
    """An answer for each run except the baseline; last, all runs against before fine-tuning."""
    answers = [_answer(report, run) for run in report.runs[1:] or report.runs]
    if report.baseline:
        since = [(run.label, text) for run in report.runs if (text := _since_before(report, run))]
        if since:
            answers.append(Answer("Scores", "the checkpoint before fine-tuning", since))
    return answers


def answer_text(report: Report) -> list[str]:
    """:func:`answers` as paragraphs."""
    paragraphs = []
    for answer in answers(report):
        against = f" against {answer.reference}" if answer.reference else ""
        lines = [f"{label}: {text.rstrip('.')}." for label, text in answer.findings]
        paragraphs.append("\n".join([f"{answer.run}{against}", *lines]).replace("\xa0", " "))
    return paragraphs


def _answer(report: Report, run: Run) -> Answer:
    changes, scores = expert_changes(report, run), report.against_baseline(run)
    load = [c for c in changes if c.word == word("routing/max_violation")]
    method = goal_text(run) if report.baseline is None else None
    goal = goal_word(run) if method else None  # with a baseline, changes are against that
    parts = [("Warning", run.collapse), *_objective(report, run),
             ("Scores", _scores(report, run, scores)),
             ("Experts", _experts([c for c in changes if c not in load and c.word != goal])),
             ("Method", method), ("Load", load[0].describe() if load else None),
             ("Red figures", _red_figures(report, run)),
             ("Trained", _trained(run)), ("Merge", _merge(run)), ("Cost", _cost(run))]  # fmt: skip
    findings = [(label, text) for label, text in parts if text]
    if {label for label, _ in findings} <= {"Trained", "Merge", "Cost"}:
        findings.insert(0, ("Experts", "nothing was measured"))
    compared = scores or any(math.isfinite(change.share) for change in changes)
    reference = baseline_label(report) if compared else ""
    return Answer(run.label, reference, findings)


def _experts(changes: list[Change]) -> str | None:
    compared = any(math.isfinite(change.share) for change in changes)
    described = [c.describe() for c in changes if c.moved or not compared]
    return ", ".join(described[:6]) or ("hardly changed" if changes else None)


def _trained(run: Run) -> str | None:
    """Which experts got LoRA, where the run chose them; that a run without targets has none."""
    if isinstance(chosen := run.summary.get("experts"), str):
        return chosen
    lora, router = run.recipe.get("lora") or {}, run.recipe.get("router") or {}
    if lora.get("targets") == [] and router.get("train") == "full":
        return "the routers only, in full: there is no adapter, and merged/ has them"
    return None


def _red_figures(report: Report, run: Run) -> str | None:
    """What a change for the worse means, and what to do about it."""
    changes = expert_changes(report, run, metric_names(report))
    worse = [change for change in changes if change.verdict == "worse"]
    if not worse:
        return None
    names = _some([c.word.name if c.word.name == "MaxVio" else c.word.name.lower() for c in worse])
    text = f"{names} moved away from even load and experts that differ"
    if report.baseline is not None:
        return f"{text}, against {report.baseline.label}"
    added = any((run.recipe.get("method") or {}).get("terms") or ())
    if not added:
        return (
            f"{text}; no loss acts against it: method=aux_loss evens the load, and "
            "method=orthogonal_variance separates experts"
        )
    return (
        f"{text}, which fine-tuning may do without any loss; a run with method=none and 'report' "
        "of both show the losses' part"
    )


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    others = len(names) - SOME
    entries = [*names[:SOME], f"{others} more"] if others > 0 else names
    return " and ".join([", ".join(entries[:-1]), entries[-1]] if len(entries) > 1 else entries)


def _merge(run: Run) -> str | None:
    """That the merge was compared with base + adapter, and how near it is."""
    verified = run.summary.get("verify")
    if not isinstance(verified, dict) or not is_number(verified.get("tensors")):
        return None
    text = f"verified: {verified['tensors']} changed tensors are base + adapter"
    if same := verified.get("same"):
        text += f", {same} of them equal to the base's"
    error = verified.get("error")
    near = is_number(error) and math.isfinite(error) and verified.get("layers") is not None
    text = f"{text}, logits within {error:.1e} (relative)" if near else text
    return f"{text}; {note}" if (note := verified.get("note")) else text


def _cost(run: Run) -> str | None:
    """Steps, tokens, time and memory of a run."""
    trained, memory = run.curves.get("end/train_runtime"), run.summary.get("peak_memory")
    if of_gpu := run.curves.get("peak_memory_gib"):
        memory = max(of_gpu.values) * 2**30
    count = _tokens(run)
    steps = counted(int(run.last_step), "step") if run.last_step is not None else None
    parts = [steps, counted(int(count), "token") if math.isfinite(count) else None]
    parts += [f"{duration(trained.values[-1])} of training" if trained else None]
    of_run = run.summary.get("run_memory")  # without the libraries, as the plan predicts
    if is_number(of_run) and not of_gpu and is_number(memory):
        parts.append(f"at most {of_run / 2**30:.2f} GiB without libraries")
        parts.append(f"{memory / 2**30:.1f} GiB with them")
    elif is_number(memory):
        parts.append(f"at most {memory / 2**30:.1f} GiB")
    return ", ".join(part for part in parts if part) or None


def _tokens(run: Run) -> float:
    """The tokens that a run trained on; NaN if it did not count them."""
    tokens = run.curves.get("num_tokens")
    return tokens.values[-1] if tokens else math.nan


def _scores(report: Report, run: Run, differences: dict[str, Difference]) -> str | None:
    references = report.baseline.scores if report.baseline else run.base_scores
    pairs = {task: (references[task], run.scores[task]) for task in differences}
    nothing = [task for task, pair in pairs.items() if all(_never_right(s) for s in pair)]
    unclear = [
        task for task, d in differences.items()
        if d.verdict in ("unclear", "unknown") and task not in nothing
    ]  # fmt: skip
    parts = _clear(differences)
    if unclear:
        tasks = f"{len(unclear)} benchmarks"
        if len(unclear) < 5:
            tasks = ", ".join(
                f"{task} ({' → '.join(score_text(score) for score in pairs[task])})"
                for task in unclear
            )
        parts.append(f"no clear difference on {tasks}")
    if nothing:
        parts.append(
            f"no reply was right on {', '.join(nothing)}, in either: compare the prompts in "
            "samples.jsonl with the training rows"
        )
    return "; ".join(parts) or None


def _never_right(score: Score) -> bool:
    return score.is_share and score.value == 0


def _clear(differences: dict[str, Difference]) -> list[str]:
    """What is clearly better and worse, with intervals."""
    parts = []
    for verdict in ("better", "worse"):
        tasks = [
            f"{task} ({d.text()}, 95\xa0% interval {d.interval_text()})"
            for task, d in differences.items() if d.verdict == verdict
        ]  # fmt: skip
        parts += [f"{verdict} on {', '.join(tasks)}"] if tasks else []
    return parts


def _since_before(report: Report, run: Run) -> str | None:
    """How a run changed the scores of the checkpoint that it started from."""
    differences = report.against_before(run)
    return ("; ".join(_clear(differences)) or "no clear difference") if differences else None


def _objective(report: Report, run: Run) -> list[tuple[str, str]]:
    """The final value of the stage's objective: on validation data, otherwise in training."""
    for names in OBJECTIVES:
        pairs = [_ended(report, run, f"eval_{name}") or _ended(report, run, name) for name in names]
        if findings := [pair for pair in pairs if pair]:
            return findings
    return []


def _ended(report: Report, run: Run, name: str) -> tuple[str, str] | None:
    if name not in run.curves:
        return None
    base = report.baseline
    start, end = ends(run.curves[name])
    rows = run.summary.get("validation_rows") if name.startswith("eval_") else None
    measured = f" on {counted(rows, 'row')}" if isinstance(rows, int) else ""
    if base is None and name.endswith("rewards/accuracies"):
        # Before training the policy is the reference: every pair is a tie, which is no start.
        # In training it is of a few rows that are trained on, which says little about others.
        trained = "" if name.startswith("eval_") else "; set data.validation for held-out pairs"
        return word(name).name, f"{number(end)}{measured} (chance is 0.5){trained}"
    if base is None:
        return word(name).name, f"{number(start)} → {number(end)}{measured}"
    if name not in base.curves or not losses_compare(base, run):
        return None
    other = ends(base.curves[name])[1]
    if number(other) == number(end):
        return word(name).name, f"{number(end)} in both{measured}"
    percent = Change(Word(""), other, end).percent
    return word(name).name, f"{number(end)} against {number(other)} ({percent}){measured}"


def _render(report: Report) -> Markup | None:
    notes = [tag("li", note) for note in _different_data(report)]
    cards = [_run_card(report, run) for run in report.runs]
    return join([
        tag("div", [_show(answer) for answer in answers(report)], class_="lede"),
        tag("ul", notes, class_="warning") if notes else None,
        group("Scores", grid) if (grid := score_table(report)) else None,
        group("Experts", grid) if (grid := experts_table(report)) else None,
        folded("The runs", tag("div", cards, class_="cards")),
    ])  # fmt: skip


def _show(answer: Answer) -> Markup:
    against = join([" against ", breakable(answer.reference)]) if answer.reference else None
    rows = [
        tag("div", tag("dt", breakable(label)), tag("dd", text)) for label, text in answer.findings
    ]
    return join([tag("p", tag("strong", breakable(answer.run)), against), tag("dl", rows)])


def _different_data(report: Report) -> Iterator[str]:
    """Yield a sentence for data that differ between runs, whose numbers do not compare."""
    runs = report.runs
    if differ(
        runs,
        lambda r: (
            r.routing_after and (r.routing_after.data.get("data"), r.routing_after.measured_on)
        ),
    ):
        yield (
            "The routing of these runs was measured on different tokens: their routing metrics "
            "differ for that reason as well."
        )
    for what, value in (("stages", lambda r: r.stage), ("base models", lambda r: r.model)):
        if differ(runs, value):
            named = ", ".join(dict.fromkeys(str(value(run)) for run in runs))
            yield f"These runs have different {what} ({named}): their losses do not compare."
    if keys := [key for key in different_keys(run.recipe for run in runs) if not _named(key)]:
        has_all = "; Settings has all" if len(keys) > SOME else ""
        yield (
            f"Apart from the method, these runs differ in {_some(keys)}{has_all}: their numbers "
            "may differ for that reason as well."
        )
    if differ(runs, lambda r: (r.recipe.get("router") or {}).get("train")):
        yield "The routers of these runs train differently (router.train): so may their routing."
    if differ(runs, lambda r: str((r.recipe.get("data") or {}).get("validation") or "") or None):
        yield "These runs have different validation data: their validation losses do not compare."
    suites = differ(runs, lambda r: (r.evaluation.get("suite") or {}).get("sha256"))
    unlike = [
        task for run in runs[1:]
        for task, d in report.against_baseline(run).items() if d.other_items
    ]  # fmt: skip
    if suites or unlike:
        tasks = f" ({', '.join(dict.fromkeys(unlike))})" if unlike else ""
        yield (
            f"These runs did not answer the same prompts{tasks}: their scores are compared as "
            "independent samples."
        )


def _named(key: str) -> bool:
    """Whether a key is the method's, whose effect a report shows, or has its own sentence."""
    sentences = ("stage", "model.path", "data.validation", "router.train", "plugins")
    section = key.partition(".")[0]
    return section == "method" or key in sentences or key.startswith("data.validation.")


def _run_card(report: Report, run: Run) -> Markup:
    steps, count = run.last_step, _tokens(run)
    seconds = run.summary.get("seconds")
    facts = {
        "Checkpoint": run.model,
        "Method": run.method,
        "Steps": number(int(steps)) if steps is not None else None,
        "Trained on": f"{number(round(count))} tokens" if math.isfinite(count) else None,
        "Time": duration(seconds) if is_number(seconds) else None,
        "Hardware": _hardware(run),
        "Evaluated in": run.evaluation.get("backend"),
    }
    if newer := run.environment.get("newer_than_tested"):
        facts["Newer than tested"] = ", ".join(map(str, newer))
    rows = [tag("div", tag("dt", k), tag("dd", v or DASH)) for k, v in facts.items()]
    badge = tag("span", "baseline", class_="badge") if run is report.baseline else None
    heading = tag("h4", report.swatch(run), badge)
    color = f"--c:{report.color(run)}"
    return tag("article", heading, tag("dl", rows), class_="card run", style=color)


def _hardware(run: Run) -> str | None:
    accelerators = run.environment.get("accelerators")
    if accelerators:
        names = dict.fromkeys(accelerators)
        return ", ".join(f"{accelerators.count(name)} × {name}" for name in names)
    processor, cores = run.environment.get("processor"), run.environment.get("cores")
    return f"{processor}, {cores} cores" if processor and cores else processor


ANSWER = Section("answer", "Summary", _render)
