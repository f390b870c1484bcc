"""What the losses changed: routing and experts on held-out data, against the baseline run."""

from __future__ import annotations

import math

from moe_finetune.metrics.words import Word, word
from moe_finetune.report.charts.bars import bars
from moe_finetune.report.context import Report, Section
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.runs import Run

METRICS = (
    "eval_routing/expert_overlap", "eval_routing/score_variance", "eval_routing/entropy",
    "eval_routing/max_violation", "eval_routing/activation_cosine", "eval_routing/output_cosine",
    "eval_routing/coupling_mass", "eval_loss",
)  # fmt: skip
NOTHING = 0.02
"""Changes below this share are called none."""


def last(run: Run, name: str) -> float:
    """The run's last evaluation; NaN where there is none."""
    curve = run.curves.get(name)
    return curve.values[-1] if curve is not None and curve.values else math.nan


def _render(report: Report) -> Markup | None:
    baseline = report.baseline
    if baseline is None:
        return None
    names = [
        name
        for name in METRICS
        if math.isfinite(last(baseline, name))
        and any(math.isfinite(last(run, name)) for run in report.runs[1:])
    ]
    if not any(name.startswith("eval_routing/") for name in names):
        return None
    cards = [_card(report, baseline, name) for name in names]
    sentences = [
        join([tag("strong", run.label), f" against {baseline.label}: {_told(baseline, run)}. "])
        for run in report.runs[1:]
    ]
    intro = "Held-out data, last evaluation while training, mean over layers."
    return join(
        [
            tag("p", sentences, class_="lede"),
            tag("p", intro, class_="intro"),
            tag("div", cards, class_="cards"),
        ]
    )


def _told(baseline: Run, run: Run) -> str:
    """Say the largest changes first."""
    found = []
    for name in METRICS:
        before, after = last(baseline, name), last(run, name)
        share = change(before, after)
        if math.isfinite(share):
            found.append((abs(share), f"{_in_a_sentence(name)} {change_text(before, after)}"))
    moved = [text for size, text in sorted(found, key=lambda pair: -pair[0]) if size >= NOTHING]
    loss = f"validation loss {change_text(last(baseline, 'eval_loss'), last(run, 'eval_loss'))}"
    kept = [text for text in moved[:4] if not text.startswith("validation loss")]
    if math.isfinite(last(run, "eval_loss")) and math.isfinite(last(baseline, "eval_loss")):
        kept.append(loss)
    return ", ".join(kept) or "nothing moved"


def _in_a_sentence(name: str) -> str:
    title = _about(name).name
    return title if title == "MaxVio" else title[:1].lower() + title[1:]


def _about(name: str) -> Word:
    return word(name.removeprefix("eval_") if name.startswith("eval_routing/") else name)


def change(before: float, after: float) -> float:
    """The change as a share of ``before``; NaN where that says nothing."""
    return (after - before) / abs(before) if before and math.isfinite(before) else math.nan


def change_text(before: float, after: float) -> str:
    """The change in percent, with its sign."""
    share = change(before, after)
    if not math.isfinite(share):
        return DASH
    digits = 0 if abs(share) >= 0.1 else 1
    return f"{100 * share:+.{digits}f}\u00a0%".replace("-", "−")


def _card(report: Report, baseline: Run, name: str) -> Markup:
    about = _about(name)
    values = [
        (run.label, last(run, name), report.color(run))
        for run in report.runs
        if math.isfinite(last(run, name))
    ]
    rows = []
    for run in report.runs[1:]:
        before, after = last(baseline, name), last(run, name)
        if not math.isfinite(after):
            continue
        rows.append(
            tag(
                "li",
                report.swatch(run) if len(report.runs) > 2 else None,
                tag(
                    "span",
                    change_text(before, after),
                    class_=f"big verdict {_verdict(about, change(before, after))}",
                ),
            )
        )
    told = "; ".join(f"{label} {number(value)}" for label, value, _ in values)
    legend = [tag("li", report.swatch(run)) for run in report.runs]
    return tag(
        "article",
        tag("h4", about.name, tag("span", about.meaning, class_="note")),
        tag("ul", rows, class_="plain"),
        bars(about.name, told, values),
        tag("ul", legend, class_="key"),
        class_="card change",
    )


def _verdict(about: Word, share: float) -> str:
    if not math.isfinite(share) or abs(share) < NOTHING or not about.good:
        return "unclear"
    return "better" if share * about.good > 0 else "worse"


CHANGES = Section("changes", "What changed", _render)
