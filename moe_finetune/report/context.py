"""The data that every section of the page reads, and the form of a section."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moe_finetune.evaluation.score import Score
from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.charts.lines import Series
from moe_finetune.report.markup import Markup, breakable, number, tag
from moe_finetune.report.read_runs import Run
from moe_finetune.report.routing_snapshots import Routing
from moe_finetune.report.score_differences import Difference, differences

Cell = object
"""Content of a table cell: markup, or any value that is shown as text."""
BEFORE = "var(--muted)"  # the checkpoint before fine-tuning: hollow dots and dotted lines
START, END = -1.0, math.inf
"""Steps that stand for before and after fine-tuning."""


def swatch(label: str, color: str, *, hollow: bool = False) -> Markup:
    """Return a name behind a dot of its color."""
    kind = "dot hollow" if hollow else "dot"
    dot = tag("span", class_=kind, style=f"--c:{color}", aria_hidden="true")
    return tag("span", dot, tag("span", breakable(label)), class_="run-name")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A routing snapshot with its label and color; ``run`` is the run's label."""

    label: str
    color: str
    routing: Routing
    run: str
    is_before: bool = False

    @property
    def name(self) -> Markup:
        """The label behind a dot: hollow before fine-tuning, filled after it."""
        return swatch(self.label, self.color, hollow=self.is_before)

    def by_layer(self, values: Sequence[float]) -> Series:
        """A value of each MoE layer as a line over depth, dotted before fine-tuning."""
        layers = [float(layer) for layer in self.routing.layers]
        return Series(
            self.label, self.color, layers, list(values), "before" if self.is_before else ""
        )


def names(shots: Sequence[Snapshot]) -> Markup:
    """Return the legend of pictures that show these snapshots together."""
    return tag("ul", [tag("li", shot.name) for shot in shots], class_="key")


@dataclass(frozen=True)
class Timeline:
    """A run's routing by step: ``START`` before fine-tuning, ``END`` after it."""

    shot: Snapshot
    routings: dict[float, Routing]


@dataclass
class Report:
    """The runs, and notes on what could not be shown."""

    runs: list[Run]
    title: str
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def baseline(self) -> Run | None:
        return self.runs[0] if len(self.runs) > 1 else None

    def color(self, run: Run) -> str:
        """Return the run's color as CSS; the baseline is gray unless it is the only run."""
        if self.baseline is None:
            return "var(--run-1)"
        index = self.runs.index(run)
        return nth_color(index - 1) if index else "var(--run-0)"

    def swatch(self, run: Run) -> Markup:
        """Return the run's label behind a dot in its color."""
        return swatch(run.label, self.color(run))

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots to show side by side: before (once if all agree), after each run."""
        loads = [run.routing_before.load_LE for run in self.runs if run.routing_before is not None]
        shared = all(np.array_equal(loads[0], load_LE) for load_LE in loads)
        shots: list[Snapshot] = []
        for run in self.runs:
            if run.routing_before is not None and not (
                shared and any(shot.is_before for shot in shots)
            ):
                label = "Before fine-tuning" if shared else f"Before · {run.label}"
                shots.append(Snapshot(label, BEFORE, run.routing_before, run.label, True))
            if run.routing_after is not None:
                label = f"After · {run.label}" if len(self.runs) > 1 else "After"
                shots.append(Snapshot(label, self.color(run), run.routing_after, run.label))
        return sorted(shots, key=lambda shot: not shot.is_before) if shared else shots

    def timelines(self) -> list[Timeline]:
        """Return the routing of each run over its training."""
        lines = []
        for run in self.runs:
            ends = {START: run.routing_before, **run.routing_steps, END: run.routing_after}
            routings = {step: routing for step, routing in ends.items() if routing is not None}
            if routings:
                last = list(routings.values())[-1]
                shot = Snapshot(run.label, self.color(run), last, run.label)
                lines.append(Timeline(shot, routings))
        return lines or [Timeline(shot, {END: shot.routing}) for shot in self.snapshots()]

    def against_baseline(self, run: Run) -> dict[str, Difference]:
        """Every benchmark of ``run`` against the baseline run, or against before fine-tuning."""
        return self._differences[run.label, self.baseline is not None]

    def against_before(self, run: Run) -> dict[str, Difference]:
        """Every benchmark of ``run`` against the checkpoint before fine-tuning."""
        return self._differences[run.label, False]

    @cached_property
    def _differences(self) -> dict[tuple[str, bool], dict[str, Difference]]:
        """By run, and whether against the baseline run: all that the page compares, decided
        together; computed once, since it resamples.
        """
        against: dict[tuple[str, bool], dict[str, Score]] = {}
        for run in self.runs:
            against[run.label, False] = run.base_scores
            if self.baseline is not None:
                against[run.label, True] = {} if run is self.baseline else self.baseline.scores
        runs = {run.label: run for run in self.runs}
        pairs = [
            (key, task, (references[task], score))
            for key, references in against.items()
            for task, score in runs[key[0]].scores.items()
            if task in references
        ]
        decided: dict[tuple[str, bool], dict[str, Difference]] = {key: {} for key in against}
        compared = differences([pair for _, _, pair in pairs])
        for (key, task, _), result in zip(pairs, compared, strict=True):
            decided[key][task] = result
        return decided

    @property
    def comparisons(self) -> int:
        """The number of differences that the page shows."""
        return sum(map(len, self._differences.values()))

    def note_missing(self, what: str, remedy: str) -> None:
        """Note what is not shown, and what would provide it."""
        if (what, remedy) not in self.missing:
            self.missing.append((what, remedy))


def differ(runs: Sequence[Run], value: Callable[[Run], Hashable | None]) -> bool:
    """Return whether the runs that have this value differ in it."""
    return len({value(run) for run in runs} - {None}) > 1


def listed(shots: Sequence[Snapshot], values: Sequence[float], digits: int = 3) -> str:
    """A value of each snapshot: ``before → after (run), after (run)``.

    With more than two runs, only the smallest and largest values after fine-tuning.
    """
    pairs = list(zip(shots, values, strict=True))
    starts = [number(value, digits) for shot, value in pairs if shot.is_before]
    ends = [(value, shot.run) for shot, value in pairs if not shot.is_before]
    ends = [pair for pair in ends if not math.isnan(pair[0])]
    if len(ends) == 1 and len(starts) < 2:
        text = number(ends[0][0], digits)
    else:
        many = len(ends) > 2 and len(starts) < 2
        pairs_shown = (min(ends), max(ends)) if many else ends
        text = (" to " if many else ", ").join(
            f"{number(v, digits)} ({run})" for v, run in pairs_shown
        )
    return " → ".join(part for part in (", ".join(starts), text) if part)


@dataclass(frozen=True)
class Section:
    """A part of the page. ``render`` returns its content, or None when there is nothing to show."""

    id: str
    title: str
    render: Callable[[Report], Markup | None]


def figure(
    title: str | Markup, *content: object, note: str | None = None, wide: bool = False
) -> Markup:
    """Return a picture under a caption that states what it shows; ``note``: how to read it."""
    explanation = tag("span", note, class_="note") if note else None
    caption = tag("figcaption", tag("strong", title), explanation)
    return tag("figure", caption, *content, class_="card wide" if wide else "card")


def group(title: str, *content: object) -> Markup:
    """Return a titled group of figures or tables within a section."""
    return tag("section", tag("h3", title), *content, class_="group")


def folded(title: str, *content: Markup | None) -> Markup | None:
    """Return content that a click unfolds; None if there is none."""
    parts = [part for part in content if part]
    return tag("details", tag("summary", title), *parts) if parts else None


def table(
    caption: str,
    columns: list[Cell],
    rows: list[list[Cell]],
    *,
    sortable: bool = False,
    keys: list[list[float | str | None]] | None = None,
    row_classes: list[str] | None = None,
) -> Markup:
    """A table that scrolls inside its own frame on a narrow screen.

    ``caption`` is announced by screen readers; the first cell of a row is its header. ``keys`` are
    values to sort by, one for each cell; None sorts last.
    """
    heads = [
        tag("th", tag("button", c, type="button") if sortable else c, scope="col",
            aria_sort="none" if sortable else None)
        for c in columns
    ]  # fmt: skip
    body = []
    for r, row in enumerate(rows):
        row_keys = keys[r] if keys else [None] * len(row)
        name = row[0] if isinstance(row[0], Markup) else breakable(str(row[0]))
        first = tag("th", name, scope="row", data_key=row_keys[0])
        cells = [tag("td", c, data_key=key) for c, key in zip(row[1:], row_keys[1:], strict=True)]
        body.append(tag("tr", first, cells, class_=row_classes[r] if row_classes else None))
    grid = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", heads)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", grid, class_="scroll", tabindex="0", role="region", aria_label=caption)
