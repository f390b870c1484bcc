"""Whether a run moved the metric that its preset is for."""

from typing import Any

from moe_finetune.losses.presets import PRESETS, Preset
from moe_finetune.metrics.words import Word, word
from moe_finetune.report.read_runs import Run, ends
from moe_finetune.report.sections.experts import Change, before_and_after

STRONGER = 3
"""Factor from one share to the next that is worth a try, as between those in docs/methods.md."""
FEW_STEPS = 200
"""Steps before which a metric that hardly moved says nothing about the strength of its loss."""
MOVED_BY = {
    "max_violation": ("load_balance",),
    "score_variance": ("variance",),
    "activation_cosine": ("specialization",),
    "router_cosine": ("router_orthogonality",),
    "output_cosine": ("dpp", "orthogonality"),
    "entropy": ("supervised_routing",),
}
"""A preset's metric -> the losses that move it; a logged loss moves itself."""


def _preset(run: Run) -> Preset | None:
    method = run.recipe.get("method") or {}
    name = str(method.get("preset")) if isinstance(method, dict) else ""
    if name not in PRESETS:
        return None
    return PRESETS[name]


def goal_word(run: Run) -> Word | None:
    """The metric that the run's preset is for."""
    preset = _preset(run)
    if preset is None or preset.goal is None:
        return None
    name = preset.goal[0]
    return word(name if "/" in name else f"routing/{name}")


def goal_text(run: Run) -> str | None:
    """The preset's own metric before and after training; None if it has none or has no values."""
    method = run.recipe.get("method") or {}
    preset = _preset(run)
    if preset is None or preset.goal is None:
        return None
    name, direction = preset.goal
    if name.startswith("losses/"):
        if name not in run.curves:
            return None
        start, end = ends(run.curves[name])
    else:
        start, end = before_and_after(run, name)
    change = Change(word(name if "/" in name else f"routing/{name}"), start, end)
    if change.share != change.share:  # NaN: not measured before, or from 0
        return None
    aim = "raise" if direction > 0 else "lower"
    text = f"{change.describe()}, which {preset.name} should {aim}"
    if not change.moved:
        return f"{text}: hardly moved; {_advice(preset, method.get('terms') or {}, run.last_step)}"
    return text if change.share * direction > 0 else f"{text}: moved the other way"


def _advice(preset: Preset, terms: dict[str, Any], steps: float | None) -> str:
    """More steps; after many, a larger share of the one loss that is for the metric, at most 1."""
    assert preset.goal is not None
    metric, more = preset.goal[0], "train for more steps"
    losses = MOVED_BY.get(metric, (metric.removeprefix("losses/"),))
    name = next((loss for loss in losses if loss in preset.terms), None)
    if name is None or (steps or 0) < FEW_STEPS:
        return more
    options = terms.get(name) or {}
    share = options.get("share") if isinstance(options, dict) else None
    stronger = min(1.0, STRONGER * share) if isinstance(share, int | float) else 0.1
    if isinstance(share, int | float) and stronger <= share:
        return more
    return f"{more}, or set method.terms.{name}.share: {stronger:.2g}"
