"""What every section of the page reads, and what a section is."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_finetune.evaluation.score import Score
from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.charts.lines import Series
from moe_finetune.report.compare import Difference, difference
from moe_finetune.report.markup import Markup, breakable, number, tag
from moe_finetune.report.routing import Routing
from moe_finetune.report.runs import Run

BEFORE = "var(--muted)"  # the checkpoint before fine-tuning: hollow dots and dotted lines


def swatch(label: str, color: str, *, hollow: bool = False) -> Markup:
    """Return a name behind a dot of its colour."""
    kind = "dot hollow" if hollow else "dot"
    dot = tag("span", class_=kind, style=f"--c:{color}", aria_hidden="true")
    return tag("span", dot, tag("span", breakable(label)), class_="run-name")


@dataclass(frozen=True)
class Snapshot:
    """A routing snapshot with the words and the colour it is shown by; ``run`` is its label."""

    label: str
    color: str
    routing: Routing
    run: str
    before: bool = False

    @property
    def name(self) -> Markup:
        """The label behind a dot: hollow before fine-tuning, filled after it."""
        return swatch(self.label, self.color, hollow=self.before)

    def by_layer(self, values: Sequence[float]) -> Series:
        """A value of each MoE layer as a line over depth, dotted before fine-tuning."""
        layers = [float(layer) for layer in self.routing.layers]
        return Series(self.label, self.color, layers, list(values), "before" if self.before else "")


def names(shots: Sequence[Snapshot]) -> Markup:
    """Return the legend of pictures that show these snapshots together."""
    return tag("ul", [tag("li", shot.name) for shot in shots], class_="key")


@dataclass(frozen=True)
class Timeline:
    """A run's routing by step: ``START`` before fine-tuning, ``END`` after it."""

    shot: Snapshot
    routings: dict[float, Routing]


START, END = -1.0, math.inf


@dataclass
class Report:
    """The runs, and the notes that sections leave on what they could not show."""

    runs: list[Run]
    title: str
    missing: list[tuple[str, str]] = field(default_factory=list)
    _differences: dict[tuple[int, int], Difference] = field(default_factory=dict)

    @property
    def baseline(self) -> Run | None:
        return self.runs[0] if len(self.runs) > 1 else None

    def color(self, run: Run) -> str:
        """Return the run's colour as CSS; the baseline is grey, a single run is not."""
        if self.baseline is None:
            return "var(--run-1)"
        index = self.runs.index(run)
        return nth_color(index - 1) if index else "var(--run-0)"

    def swatch(self, run: Run) -> Markup:
        """Return the run's label behind a dot in its colour."""
        return swatch(run.label, self.color(run))

    def snapshots(self) -> list[Snapshot]:
        """Return the pictures to lay side by side: before (once if all agree), after each run."""
        befores = [run for run in self.runs if run.before is not None]
        shots: list[Snapshot] = []
        if _all_equal([run.before for run in befores if run.before is not None]):
            for run in befores[:1]:
                assert run.before is not None
                shots.append(Snapshot("Before fine-tuning", BEFORE, run.before, run.label, True))
            befores = []
        for run in self.runs:
            name = f" · {run.label}" if len(self.runs) > 1 else ""
            if run in befores and run.before is not None:
                shots.append(Snapshot(f"Before{name}", BEFORE, run.before, run.label, True))
            if run.after is not None:
                shots.append(Snapshot(f"After{name}", self.color(run), run.after, run.label))
        return shots

    def timelines(self) -> list[Timeline]:
        """Return the routing of each run over its training; of each snapshot where no run is."""
        found = []
        for run in self.runs:
            ends = {START: run.before, **run.routing_steps, END: run.after}
            known = {step: routing for step, routing in ends.items() if routing is not None}
            if known:
                shot = Snapshot(run.label, self.color(run), list(known.values())[-1], run.label)
                found.append(Timeline(shot, known))
        return found or [Timeline(shot, {END: shot.routing}) for shot in self.snapshots()]

    def difference(self, baseline: Score, score: Score) -> Difference:
        """Return what :func:`difference` finds, which resamples, once for the page."""
        pair = id(baseline), id(score)
        if pair not in self._differences:
            self._differences[pair] = difference(baseline, score)
        return self._differences[pair]

    def lacks(self, what: str, remedy: str) -> None:
        """Note what is not shown, and what would bring it."""
        if (what, remedy) not in self.missing:
            self.missing.append((what, remedy))


def _all_equal(routings: list[Routing]) -> bool:
    first = routings[0] if routings else None
    return all(first is not None and np.array_equal(first.load_LE, r.load_LE) for r in routings)


def differ(runs: Sequence[Run], value: Callable[[Run], Hashable | None]) -> bool:
    """Tell whether the runs that have this value have different ones."""
    return len({found for run in runs if (found := value(run)) is not None}) > 1


def listed(shots: Sequence[Snapshot], values: Sequence[float], digits: int = 3) -> str:
    """Say a value of each snapshot: ``before → after (run), after (run)``.

    Of more than two runs, the least and the greatest value after fine-tuning are said.
    """
    pairs = list(zip(shots, values, strict=True))
    before = [number(v, digits) for shot, v in pairs if shot.before]
    after = [(v, shot.run) for shot, v in pairs if not shot.before and not math.isnan(v)]
    if len(after) > 2 and len(before) < 2:
        ends = (min(after), max(after))
        told = " to ".join(f"{number(v, digits)} ({run})" for v, run in ends)
    elif len(after) == 1 and len(before) < 2:
        told = number(after[0][0], digits)
    else:
        told = ", ".join(f"{number(v, digits)} ({run})" for v, run in after)
    return " → ".join(part for part in (", ".join(before), told) if part)


@dataclass(frozen=True)
class Section:
    """A part of the page. ``render`` returns its content, or None when there is nothing to show."""

    id: str
    title: str
    render: Callable[[Report], Markup | None]


def figure(
    title: str | Markup, *content: object, note: str | None = None, wide: bool = False
) -> Markup:
    """Return a picture under a caption that says what to see; ``note`` explains how to read it."""
    caption = tag(
        "figcaption",
        tag("strong", title),
        tag("span", note, class_="note") if note else None,
    )
    return tag("figure", caption, *content, class_="card wide" if wide else "card")


def group(title: str, *content: object, intro: str | None = None) -> Markup:
    """Return a titled group of figures or tables within a section."""
    return tag(
        "section",
        tag("h3", title),
        tag("p", intro, class_="intro") if intro else None,
        *content,
        class_="group",
    )


def folded(title: str, *content: Markup | None) -> Markup | None:
    """Return content that a click unfolds; None without any."""
    shown = [part for part in content if part]
    return tag("details", tag("summary", title), *shown) if shown else None


def table(
    caption: str,
    columns: list[object],
    rows: list[list[object]],
    *,
    sortable: bool = False,
    keys: list[list[float | str | None]] | None = None,
    row_classes: list[str] | None = None,
) -> Markup:
    """Return a table that scrolls inside its own frame on a narrow screen.

    Args:
        caption: what the table holds, for everyone and for screen readers.
        columns: header cells.
        rows: body cells; the first of a row is its header.
        sortable: let a click on a header sort the rows.
        keys: values to sort by, one for each cell; None sorts last.
        row_classes: a CSS class for each row.
    """
    head = [
        tag(
            "th",
            tag("button", c, type="button") if sortable else c,
            scope="col",
            aria_sort="none" if sortable else None,
        )
        for c in columns
    ]
    body = []
    for r, row in enumerate(rows):
        cells = []
        for c, cell in enumerate(row):
            key = keys[r][c] if keys else None
            attributes = {"data_key": key}
            cells.append(
                tag("th", cell, scope="row", **attributes)
                if c == 0
                else tag("td", cell, **attributes)
            )
        body.append(tag("tr", cells, class_=row_classes[r] if row_classes else None))
    grid = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", grid, class_="scroll", tabindex="0", role="region", aria_label=caption)
