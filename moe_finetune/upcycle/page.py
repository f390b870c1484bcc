"""The comparison of the arms as a page of the report: tables, curves, intervals, texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.io.run_folder import read_log
from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.charts.intervals import Dot, dot_plot
from moe_finetune.report.charts.lines import Series, line_chart
from moe_finetune.report.charts.scatter import largest_groups
from moe_finetune.report.context import (
    Report,
    Section,
    Snapshot,
    figure,
    group,
    swatch,
    table,
)
from moe_finetune.report.markup import Markup, join, tag
from moe_finetune.report.routing import Routing
from moe_finetune.report.sections.load import frequencies, load, load_title
from moe_finetune.report.sections.specialization import SPECIALIZATION
from moe_finetune.report.sections.text import COLORED, color_key, coloured
from moe_finetune.upcycle.files import CURVES
from moe_finetune.upcycle.recipe import UpcycleRecipe
from moe_finetune.upcycle.results import Arm
from moe_finetune.upcycle.tables import PAPERS_ORDER, Table

_MEASURES = {"cmr_1": "CMR_1, 1 is best", "s_rl": "S_RL, nats", "perplexity": "perplexity"}


Curve = list[tuple[float, float]]
"""Steps and the mean training loss since the step before, nats a token."""


def read_curves(output: Path) -> dict[str, Curve]:
    """Every curve by its training's name: ``dense``, ``seed-S.expert-N``, ``seed-S.ARM``."""
    return {
        file.stem: [
            (float(row["step"]), float(row["loss"]))
            for row in read_log(file)
            if row.get("kind") == "train"
        ]
        for file in sorted((output / CURVES).glob("*.jsonl"))
    }


@dataclass(frozen=True)
class Chart:
    """Curves that share a picture; those of arms are named as in the tables."""

    title: str
    y_label: str
    curves: dict[str, Curve]
    of_arms: bool = False


def shown_curves(recipe: UpcycleRecipe, curves: Mapping[str, Curve]) -> list[Chart]:
    """The first seed's curves as pictures: arms, experts, routers, and the dense model's."""
    at = f"seed-{recipe.seeds[0]}"

    def present(names: Mapping[str, str]) -> dict[str, Curve]:
        return {label: curves[name] for label, name in names.items() if curves.get(name)}

    arms = {arm.label or name: f"{at}.{name}" for name, arm in recipe.arms.items()}
    experts = {f"expert {n}": f"{at}.expert-{n}" for n in range(recipe.clusters.count)}
    language = "language model's loss, nats a token"
    charts = [
        Chart("Fine-tuning of the arms", language, present(arms), of_arms=True),
        Chart("Training of the experts", language, present(experts)),
        Chart(
            "Training of the routers",
            "supervised routing's loss, nats, summed over layers",
            present({"routers": f"{at}.router"}),
        ),
        Chart("Pretraining of the dense model", language, present({"dense": "dense"})),
    ]
    return [chart for chart in charts if chart.curves]


@dataclass
class ArmsReport(Report):
    """A report on arms: its pictures of routing are theirs."""

    shots: list[Snapshot] = field(default_factory=list)

    def snapshots(self) -> list[Snapshot]:
        return self.shots


def render(
    arms: Sequence[Arm],
    held: Sequence[Table],
    clusters: dict[str, int],
    charts: Sequence[Chart] = (),
    title: str = "From dense to a mixture of experts",
) -> str:
    """Return the page's HTML.

    Args:
        arms: measurements; the first is the baseline.
        held: the tables to show.
        clusters: cluster of each category.
        charts: the trainings' losses.
        title: the page's heading.
    """
    from moe_finetune.report.page import render_page

    colors = {arm.name: nth_color(i - 1) if i else "var(--run-0)" for i, arm in enumerate(arms)}
    shots = [_shot(arm, colors[arm.name], list(clusters)) for arm in arms if arm.routed]
    report = ArmsReport([], title, shots=shots)
    sections = [
        Section("tables", "Tables", lambda _: join(map(_table, held))),
        Section("measures", "Measures on test", lambda _: _measures(arms, colors)),
        Section("losses", "Losses in training", lambda _: _losses(report, charts, colors)),
        Section("frequency", "Text by token frequency", lambda _: _frequent(arms)),
        Section("selection", "Selection frequency", _selection),
        SPECIALIZATION,
    ]
    return render_page(report, sections)


def _table(held: Table) -> Markup:
    columns: list[object] = [*held.columns]
    rows: list[list[object]] = [[*row] for row in held.rows]
    return figure(held.title, table(held.title, columns, rows), note=held.note, wide=True)


def _measures(arms: Sequence[Arm], colors: dict[str, str]) -> Markup:
    charts = []
    for metric, label in _MEASURES.items():
        chosen = [arm for arm in arms if arm.routed or metric == "perplexity"]
        if not chosen:
            continue
        rows = []
        for arm in chosen:
            found = arm.estimate(metric)
            seeds = ", ".join(f"{value:.3f}" for value in found.values)
            said = f"{arm.name}: {found.mean:.3f}, each seed {seeds}"
            dot = Dot(found.mean, found.low, found.high, colors[arm.name], said)
            rows.append((arm.name, [dot], float("nan")))
        note = "Mean over seeds and its 95 % interval."
        if metric == "perplexity":
            note += f" {PAPERS_ORDER}"
        plot = dot_plot(f"{label} on test", f"{label} of each arm.", rows, x_label=label)
        charts.append(figure(f"{label} on test", plot, note=note, wide=True))
    return join(charts)


def _losses(report: ArmsReport, charts: Sequence[Chart], colors: dict[str, str]) -> Markup | None:
    """The curves of Figure 2, and those of the stages before."""
    if not charts:
        report.lacks("Losses in training", "curves/ holds no log of this recipe's trainings")
        return None
    drawn = []
    for chart in charts:
        series = [
            Series(
                label,
                colors[label] if chart.of_arms else nth_color(number),
                [step for step, _ in curve],
                [loss for _, loss in curve],
            )
            for number, (label, curve) in enumerate(chart.curves.items())
        ]
        ends = ", ".join(f"{each.label} {each.y[-1]:.3f}" for each in series)
        picture = line_chart(chart.title, f"Last values: {ends}.", series)
        names = tag("ul", [tag("li", swatch(s.label, s.color)) for s in series], class_="key")
        title = f"{chart.title}: {ends}"
        drawn.append(figure(title, names, picture, note=chart.y_label, wide=True))
    note = "The first seed's; every training's log is in curves/."
    return group("Loss by step (Figure 2)", *drawn, intro=note)


def _frequent(arms: Sequence[Arm]) -> Markup | None:
    """Figure 1c: test texts in the color of the expert whose texts have each token most often."""
    routed = [arm for arm in arms if arm.routed and arm.measured[0]["passages"]]
    if not routed:
        return None
    shown = [
        {**passage, "experts": passage["frequent"]} for passage in routed[0].measured[0]["passages"]
    ]
    known = [e for passage in shown for e in passage["experts"] if e >= 0]
    named = largest_groups(known, COLORED)
    agreed = []
    for arm in routed:
        pairs = [
            chosen == frequent
            for passage in arm.measured[0]["passages"]
            for chosen, frequent in zip(passage["experts"], passage["frequent"], strict=True)
            if frequent >= 0
        ]
        agreed.append(f"{arm.name} {100 * float(np.mean(pairs)):.0f}")
    title = (
        "Tokens in the colour of the expert whose training texts have them most often (Figure 1c); "
        f"the first choice of layer {shown[0]['layer']} is that expert for, in %: "
        f"{', '.join(agreed)}"
    )
    text = tag("div", coloured(shown, named), class_="panels broad")
    note = (
        "The same texts in the colors of the chosen experts (Figures 1a and 1b) are further down. "
        "The paper shows one text and layer 16; evaluation.passage_layer chooses another layer."
    )
    return figure(title, color_key(named), text, note=note, wide=True)


def _selection(report: Report) -> Markup | None:
    shots = report.snapshots()
    if not shots:
        return None
    title = f"{load_title(shots)} (Figure 3: selections on test by layer, an even share is 1)"
    return join([load(report.timelines(), title), frequencies(shots)])


def _shot(arm: Arm, color: str, categories: list[str]) -> Snapshot:
    first: dict[str, Any] = arm.measured[0]
    selected_CLN = np.array(first["splits"]["test"]["routing"]["selected"])
    layers, experts = selected_CLN.shape[1:]
    data = {
        "layers": list(range(layers)),
        "num_experts": experts,
        "top_k": first["top_k"],
        "load": selected_CLN.sum(0).tolist(),
        "domains": {name: selected_CLN[c].tolist() for c, name in enumerate(categories)},
        "colored_text": first["passages"],
    }
    return Snapshot(arm.name, color, Routing.parse(data, Path(arm.name)), arm.name)
