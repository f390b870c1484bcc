"""``study --plan``: the runs, what each needs, and what the estimates assume. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_finetune.experiments import folder as disk
from moe_finetune.experiments.cost import Cost, Estimator
from moe_finetune.experiments.expand import Run
from moe_finetune.experiments.recipe import StudyRecipe
from moe_finetune.io.tables import aligned
from moe_finetune.training.memory.plan import GIB

UNKNOWN = "?"


def plan_text(study: StudyRecipe, runs: Sequence[Run], output: Path | None = None) -> str:
    """A table with one line an arm, totals, and the assumptions."""
    estimate, assumed = Estimator(study.plan), study.plan
    header = ["arm", "runs", "parameters", "trained", "GiB/device", "devices", "tokens", "hours"]
    if output is not None:
        header.append("finished")
    lines, reasons = [header], []
    known = total = 0.0
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        cost = estimate(own[0].recipe)
        line = [arm, str(len(own)), *_cells(cost)]
        if output is not None:
            line.append(str(sum(disk.state_of(output, run.name) == "finished" for run in own)))
        lines.append(line)
        if cost.unknown and cost.unknown not in reasons:
            reasons.append(cost.unknown)
        if cost.hours is not None:
            total += cost.hours * len(own)
            known += len(own)
    out = [f"{study.title or study.name}: {len(runs)} runs", aligned(lines, "left")]
    out += ["", f"{total:,.1f} h one after another, {total * assumed.devices:,.1f} device hours"]
    if known < len(runs):
        out[-1] += f", for the {known:.0f} runs whose time can be estimated"
    out += [f"{UNKNOWN}: {reason}" for reason in reasons]
    out.append(
        f"Assumed: {assumed.devices} x {assumed.hardware} ({assumed.memory_gib:g} GiB, "
        f"{assumed.peak_tflops:g} TFLOP/s, of which {assumed.utilization:.0%} is met); weights and "
        "optimizer shared out evenly; 'devices' is the least number that holds a run. Loading, "
        "merging and evaluation are not counted. Change these with plan.KEY=VALUE."
    )
    return "\n".join(out)


def _cells(cost: Cost) -> list[str]:
    if cost.size is None or cost.memory is None:
        return [UNKNOWN] * 4 + [_count(cost.tokens), UNKNOWN]
    return [
        _count(cost.size.parameters),
        _count(cost.size.trained),
        f"{cost.memory / GIB:.1f}",
        str(cost.least_devices or "none"),
        _count(cost.tokens),
        UNKNOWN if cost.hours is None else f"{cost.hours:.2f}",
    ]


def _count(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.0f}"
