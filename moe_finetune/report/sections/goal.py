"""Whether a run moved the metric that its preset is for."""

from moe_finetune.losses.presets import PRESETS
from moe_finetune.metrics.words import word
from moe_finetune.report.numbers import ends
from moe_finetune.report.runs import Run
from moe_finetune.report.sections.experts import Change, before_and_after

STRONGER = 3
"""Factor from one share to the next that is worth a try, as between those in docs/methods.md."""


def goal_text(run: Run) -> str | None:
    """The preset's own metric before and after training; None if it has none or has no values."""
    method = run.recipe.get("method") or {}
    preset = PRESETS.get(str(method.get("preset"))) if isinstance(method, dict) else None
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
        return f"{text}: hardly moved; {_advice(method)}"
    return text if change.share * direction > 0 else f"{text}: moved the other way"


def _advice(method: dict) -> str:
    terms = method.get("terms")
    options = [term for term in terms.values() if isinstance(term, dict)] if terms else []
    shares = [term["share"] for term in options if isinstance(term.get("share"), int | float)]
    if shares:
        return f"train for more steps, or set method.share: {STRONGER * max(shares):.2g}"
    return "train for more steps, or set method.share: 0.1 or more"
