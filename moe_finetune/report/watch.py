"""``moe-finetune watch``: a run while it trains, in the terminal, from its files.

Shape legend: L MoE layers, E routed experts.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moe_finetune.errors import DataError
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RECIPE_FILE, RunFolder, read_log
from moe_finetune.io.terminal import curve, duration
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.metrics.shown import name, number, ordered

SHADES = " ░▒▓█"
"""Load of an expert, from none to twice an even share or more."""
COLOURS = ("grey23", "dodger_blue3", "grey70", "orange3", "red3")
LAYERS_SHOWN = 32


@dataclass(frozen=True)
class Picture:
    """What a run's folder says at one moment.

    Attributes:
        step, steps: optimizer steps done, and all of them where that is known.
        age: seconds since the run wrote its last log; None before the first.
        values: logged numbers by key, in the order of their steps.
        load_LE: share of the tokens that each expert took, over its even share; None unmeasured.
        measured: when that was, in words.
        finished: whether the run has drawn its page.
    """

    run: Path
    step: int
    steps: int | None
    age: float | None
    values: dict[str, list[float]]
    load_LE: np.ndarray | None
    measured: str
    finished: bool


def watch(folder: Path, every: float = 2.0, once: bool = False) -> None:
    """Show the run in ``folder`` until it has finished; once where nobody looks at a terminal.

    Args:
        folder: a run's, or one that holds runs: then the one that wrote last.
        every: seconds between looks.
        once: show it as it is now, and return.

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
            time.sleep(every)
            picture = look(find_run(folder))
            live.update(draw(picture, console.width), refresh=True)


def find_run(folder: Path) -> Path:
    """The run's folder: ``folder``, or the run directly in it that wrote last.

    Raises:
        DataError: there is none.
    """
    if RunFolder(folder).recipe.is_file():
        return folder
    runs = [path.parent for path in folder.glob(f"*/{RECIPE_FILE}")]
    if not runs:
        raise DataError(
            f"{folder} holds no run; name the --output of 'moe-finetune train', after it has begun"
        )
    return max(runs, key=_last_written)


def _last_written(run: Path) -> float:
    files = RunFolder(run)
    return os.path.getmtime(files.metrics if files.metrics.is_file() else files.recipe)


def look(run: Path) -> Picture:
    """Read what the run has written so far; a line that is being written is left for later."""
    files = RunFolder(run)
    rows = read_log(files.metrics)
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[key].append(float(value))
    load_LE, measured = _load(files)
    return Picture(
        run=run,
        step=max((int(row["step"]) for row in rows), default=0),
        steps=_steps(run, rows),
        age=time.time() - _last_written(run) if rows else None,
        values=dict(values),
        load_LE=load_LE,
        measured=measured,
        finished=files.page.is_file() or _trained_elsewhere(files.summary),
    )


def _trained_elsewhere(summary: Path) -> bool:
    """Whether a trainer that is not ours has ended this run; a report is its user's to ask for."""
    return summary.is_file() and bool(
        read_object(summary, DataError, "remove the file").get("trained_elsewhere")
    )


def _steps(run: Path, rows: list[dict[str, Any]]) -> int | None:
    """All steps: the recipe's, or what the share of the epochs that is done comes to."""
    trainer = (read_yaml(RunFolder(run).recipe, DataError) or {}).get("trainer") or {}
    if trainer.get("max_steps", -1) > 0:
        return int(trainer["max_steps"])
    done = [(row["step"], row["epoch"]) for row in rows if row.get("epoch")]
    if not done:
        return None
    step, epoch = done[-1]
    return round(step / epoch * trainer.get("num_train_epochs", 3))


def _load(run: RunFolder) -> tuple[np.ndarray | None, str]:
    """The newest measurement of the experts' load, and when it was taken."""
    if run.routing_after.is_file():
        return _relative(read_object(run.routing_after, DataError, "delete it")), "after"
    steps = read_log(run.routing_steps)
    if steps:
        return _relative(steps[-1]), f"at step {steps[-1]['step']}"
    if run.routing_before.is_file():
        return _relative(read_object(run.routing_before, DataError, "delete it")), "before"
    return None, ""


def _relative(measured: dict[str, Any]) -> np.ndarray:
    load_LE = np.asarray(measured["load"], dtype=float)
    return load_LE / load_LE.mean(1, keepdims=True)


def draw(picture: Picture, width: int) -> Group:
    """The picture for a terminal of ``width`` columns."""
    parts: list[Any] = [
        Text(str(picture.run), style="bold", overflow="fold"),
        Text(state_in_words(picture)),
    ]
    shown = ordered(picture.values)
    if shown:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for heading in ("", "first", "last"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        table.add_column("", no_wrap=True, overflow="crop")
        for key in shown:
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
    said = [f"step {picture.step}{of}"]
    if speed:
        said.append(f"{speed[-1]:,.0f} tokens/s")
    if picture.finished:
        said.append("finished")
    elif picture.age is None:
        said.append("no log yet")
    else:
        said.append(f"last log {duration(picture.age)} ago")
    return "  ".join(said)


def heat_map(load_LE: np.ndarray, measured: str, width: int) -> list[Text]:
    """Load by layer and expert, a character each; neighbours are averaged where they do not fit."""
    rows = _fit(load_LE, LAYERS_SHOWN)
    cells = _fit(rows.T, max(8, width - 10)).T
    merged = "" if cells.shape == load_LE.shape else ", neighbours averaged"
    head = f"load {measured}: {load_LE.shape[0]} layers down, {load_LE.shape[1]} experts across"
    lines = [Text(head + merged)]
    for number_, row in enumerate(cells):
        layer = round(number_ * (len(load_LE) - 1) / max(1, len(cells) - 1))
        line = Text(f"{layer:>6}  ")
        for value in row:
            shade = int(np.clip(round(2 * value), 0, len(SHADES) - 1))
            line.append(SHADES[shade], style=COLOURS[shade])
        lines.append(line)
    legend = Text("        ")
    for shade, words in enumerate(("none", "half", "even share", "1.5", "2 x or more")):
        legend.append(f"{SHADES[shade]} {words}  ", style=COLOURS[shade])
    return [*lines, legend]


def _fit(array_NM: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` rows: means of equal runs of neighbours."""
    if len(array_NM) <= most:
        return array_NM
    return np.stack([part.mean(0) for part in np.array_split(array_NM, most)])
