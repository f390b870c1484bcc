"""The block at the bottom of a live terminal: the running stage, its time, progress and table."""

import shutil
import time
from collections.abc import Callable
from typing import Any


class Phase:
    """A stage that is running: its progress, the rows of its table, lines of other processes."""

    def __init__(self, name: str):
        self.name, self.started = name, time.monotonic()
        self.done = self.total = 0.0
        self.note = ""
        self.rows: list[tuple[str, str, str, str]] = []
        self.status: list[str] = []


class Board:
    """The block at the bottom of a live terminal."""

    def __init__(self, current: Callable[[], Phase | None]):
        self.current = current

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        phase = self.current()
        if phase is None:
            return Text("")
        passed = time.monotonic() - phase.started
        line = Table.grid(padding=(0, 1))
        cells: list[Any] = [Text(phase.name, style="bold")]
        if phase.total:
            width = 24 if shutil.get_terminal_size().columns >= 100 else 12
            bar = ProgressBar(total=phase.total, completed=phase.done, width=width)
            cells += [bar, Text(f"{100 * phase.done / phase.total:3.0f} %")]
        else:
            cells.append(Text("·" * (1 + int(passed) % 3)))
        cells.append(Text(duration(passed)))
        if phase.note:
            cells.append(Text(phase.note, overflow="ellipsis", no_wrap=True))
        line.add_row(*cells)
        if phase.status:
            lines = [Text(text, overflow="ellipsis", no_wrap=True) for text in phase.status]
            return Group(*lines, line)
        if not phase.rows:
            return line
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
        table.add_column("", overflow="ellipsis", no_wrap=True)
        for head in ("first", "last"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, overflow="crop")
        for row in phase.rows:
            table.add_row(*(Text(cell) for cell in row))
        return Group(table, line)


def duration(seconds: float) -> str:
    """A time for people: ``4.2 s``, ``3:07``, ``1:02:33``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, remainder = divmod(int(seconds), 3600)
    minutes, rest_seconds = divmod(remainder, 60)
    return f"{hours}:{minutes:02}:{rest_seconds:02}" if hours else f"{minutes}:{rest_seconds:02}"
