"""``moe-finetune watch``: show a run in the terminal while it trains, from its files.

Shape legend: L MoE layers, E routed experts.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moe_finetune.errors import DataError
from moe_finetune.io.run_folder import RECIPE_FILE, RunFolder, read_log
from moe_finetune.io.terminal import curve, duration
from moe_finetune.metrics.shown import name, number, ordered
from moe_finetune.report.runs import Run, read_run

SHADES = " ░▒▓█"
"""Load of an expert, from none to twice an even share or more."""
COLORS = ("grey23", "dodger_blue3", "grey70", "orange3", "red3")
LAYERS_SHOWN = 32


@dataclass(frozen=True)
class Picture:
    """The state of a run's folder at one moment.

    Attributes:
        step, steps: optimizer steps done, and the total if known.
        age: seconds since the run wrote its last log; None before the first.
        values: logged numbers by key, in the order of their steps.
        load_LE: load of each expert relative to an even share; None if it was not measured.
        measured: when the load was measured, in words.
        finished: whether the run has written its report, or another trainer has finished it.
    """

    run: Path
    step: int
    steps: int | None
    age: float | None
    values: dict[str, list[float]]
    load_LE: np.ndarray | None
    measured: str
    finished: bool


def watch(folder: Path, seconds: float = 2.0, once: bool = False) -> None:
    """Show the run in ``folder`` until it finishes; only once if the output is not a terminal.

    Args:
        folder: a run's folder, or one that contains runs, of which the last one written is shown.
        seconds: time between updates.
        once: show the current state and return.

    Raises:
        DataError: there is no run, or its files cannot be read.
    """
    console = Console(highlight=False)
    picture = look(find_run(folder))
    if once or not sys.stdout.isatty():
        console.print(draw(picture, console.width))
        return
    with Live(draw(picture, console.width), console=console, auto_refresh=False) as live:
        while not picture.finished:
            time.sleep(seconds)
            picture = look(find_run(folder))
            live.update(draw(picture, console.width), refresh=True)


def find_run(folder: Path) -> Path:
    """The run's folder: ``folder``, or the run directly in it that was written last.

    Raises:
        DataError: there is no run.
    """
    if RunFolder(folder).recipe.is_file():
        return folder
    runs = [path.parent for path in folder.glob(f"*/{RECIPE_FILE}")]
    if not runs:
        raise DataError(
            f"{folder} contains no run; give the --output of a 'moe-finetune train' that has "
            "started"
        )
    return max(runs, key=_last_written)


def _last_written(run: Path) -> float:
    files = RunFolder(run)
    return os.path.getmtime(files.metrics if files.metrics.is_file() else files.recipe)


def look(folder: Path) -> Picture:
    """Read what the run has written so far; a line that is being written is skipped."""
    files, run = RunFolder(folder), read_run(folder, folder.name)
    values = {key: curve.values for key, curve in run.curves.items()}
    routing, measured = run.routing_before, "before"
    if run.routing_steps:
        step, routing = max(run.routing_steps.items(), key=lambda item: item[0])
        measured = f"at step {step:g}"
    if run.routing_after is not None:
        routing, measured = run.routing_after, "after"
    return Picture(
        run=folder,
        step=int(run.last_step or 0),
        steps=_all_steps(run, read_log(files.metrics)),
        age=time.time() - _last_written(folder) if run.curves else None,
        values=values,
        load_LE=None if routing is None else routing.relative_load_LE(),
        measured=measured,
        finished=files.page.is_file() or bool(run.summary.get("trained_elsewhere")),
    )


def _all_steps(run: Run, rows: list[dict[str, Any]]) -> int | None:
    """The recipe's number of steps, or an estimate from the finished share of the epochs."""
    trainer = run.recipe.get("trainer") or {}
    if trainer.get("max_steps", -1) > 0:
        return int(trainer["max_steps"])
    pairs = [(row["step"], row["epoch"]) for row in rows if row.get("epoch")]
    if not pairs:
        return None
    step, epoch = pairs[-1]
    return round(step / epoch * trainer.get("num_train_epochs", 3))


def draw(picture: Picture, width: int) -> Group:
    """The picture for a terminal of ``width`` columns."""
    parts: list[Any] = [
        Text(str(picture.run), style="bold", overflow="fold"),
        Text(state_in_words(picture)),
    ]
    logged = ordered(picture.values)
    if logged:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for heading in ("", "first", "last"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        table.add_column("", no_wrap=True, overflow="crop")
        for key in logged:
            values = picture.values[key]
            row = (name(key), number(values[0]), number(values[-1]), curve(values, width // 3))
            table.add_row(*map(Text, row))
        parts += [Text(), table]
    if picture.load_LE is not None:
        parts += [Text(), *heat_map(picture.load_LE, picture.measured, width)]
    return Group(*parts)


def state_in_words(picture: Picture) -> str:
    """How far the run is: ``step 5/8  1,234 tokens/s  last log 2.0 s ago``."""
    of = f"/{picture.steps}" if picture.steps else ""
    speed = picture.values.get("tokens_per_second")
    parts = [f"step {picture.step}{of}"]
    if speed:
        parts.append(f"{speed[-1]:,.0f} tokens/s")
    if picture.finished:
        parts.append("finished")
    elif picture.age is None:
        parts.append("no log yet")
    else:
        parts.append(f"last log {duration(picture.age)} ago")
    return "  ".join(parts)


def heat_map(load_LE: np.ndarray, measured: str, width: int) -> list[Text]:
    """Load by layer and expert, one character each; neighbors are averaged if they do not fit."""
    rows = _fit(load_LE, LAYERS_SHOWN)
    cells = _fit(rows.T, max(8, width - 10)).T
    merged = "" if cells.shape == load_LE.shape else ", neighbors averaged"
    head = f"load {measured}: {load_LE.shape[0]} layers down, {load_LE.shape[1]} experts across"
    lines = [Text(head + merged)]
    for index, row in enumerate(cells):
        layer = round(index * (len(load_LE) - 1) / max(1, len(cells) - 1))
        line = Text(f"{layer:>6}  ")
        for value in row:
            shade = int(np.clip(round(2 * value), 0, len(SHADES) - 1))
            line.append(SHADES[shade], style=COLORS[shade])
        lines.append(line)
    legend = Text("        ")
    for shade, words in enumerate(("none", "half", "even share", "1.5", "2 x or more")):
        legend.append(f"{SHADES[shade]} {words}  ", style=COLORS[shade])
    return [*lines, legend]


def _fit(array_NM: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` rows: means of equal runs of neighbors."""
    if len(array_NM) <= most:
        return array_NM
    return np.stack([part.mean(0) for part in np.array_split(array_NM, most)])
