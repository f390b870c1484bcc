"""A command's progress: live on a terminal, plain lines elsewhere.

Everything goes to standard error; standard output is for results. On a terminal one block stays at
the bottom and changes in place (``rich``); in a file, a pipe, CI or a batch system each line is
written once. ``log_to`` redirects the output of libraries, in this process and its children, to a
file, so that their progress bars do not break the block.
"""

import logging
import math
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from moe_finetune.io.terminal_board import Board, Phase
from moe_finetune.io.terminal_board import duration as duration

Style = Literal["live", "plain"]
OWN = "moe_finetune"
EVERY = 30.0
"""Seconds between progress lines in the plain style."""
STATUS_EVERY = 60.0
"""Seconds between lines about other processes in the plain style."""
IMPORTS = 2.0
"""Seconds after which a command that is still importing says so."""
SILENT = 10.0
"""Seconds without a line after which a command says what it is doing, then every half minute."""


class Terminal:
    """Lines, phases with their time, and progress.

    ``style`` is "live" or "plain", None: "live" if standard error is a terminal. ``quiet``: only
    warnings and errors. ``capture``: :meth:`log_to` may send file descriptors 1 and 2 to the log,
    for a command line, which owns them.
    """

    def __init__(self, style: Style | None = None, quiet: bool = False, capture: bool = False):
        self._style, self.quiet, self.capture = style, quiet, capture
        self._stream: TextIO | None = None
        self._live: Any = None
        self._phase: Phase | None = None
        self._told = 0.0
        self._last = time.monotonic()

    @property
    def stream(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    @property
    def style(self) -> Style:
        if self._style is not None:
            return self._style
        dumb = os.environ.get("TERM") == "dumb" or os.environ.get("CI")
        return "live" if self.stream.isatty() and not dumb else "plain"

    # -- lines --------------------------------------------------------------------------------

    def say(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Write a line; with ``quiet`` only warnings."""
        if self.quiet and level == "info":
            return
        self._write(text)

    def _write(self, text: str) -> None:
        self._last = time.monotonic()
        if self.style == "live":
            text = whole_words(text, shutil.get_terminal_size().columns)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            self.stream.write(text + "\n")
            self.stream.flush()
        except BrokenPipeError:
            if self._stream is None:
                raise  # the command line decides
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    # -- phases -------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A stage of the work: shown while it runs, then as one line with its time."""
        outer, self._phase = self._phase, Phase(name)
        self._told = time.monotonic()
        phase, failed = self._phase, True
        try:
            with self._shown(outer is None), self.announced(name):
                yield
            failed = False
        finally:
            self._phase = outer
            seconds = time.monotonic() - phase.started
            self.say(f"{name:<12} {'stopped after ' if failed else ''}{duration(seconds)}")

    @contextmanager
    def announced(self, name: str) -> Iterator[None]:
        """Write what is at work after :data:`SILENT` seconds without a line."""
        if self.style == "live" or self.quiet:  # the live block shows the time
            yield
            return
        started = self._last = time.monotonic()
        ended = threading.Event()

        def say() -> None:
            pause = SILENT
            while not ended.wait(max(0.1, self._last + pause - time.monotonic())):
                if time.monotonic() - self._last < pause:
                    continue
                status = self._phase.status if self._phase is not None else []
                passed = f"at work for {duration(time.monotonic() - started)}"
                self.say("; ".join(status) if status else f"{name:<12} {passed}")
                pause = STATUS_EVERY if status else EVERY

        talker = threading.Thread(target=say, daemon=True)
        talker.start()
        try:
            yield
        finally:
            ended.set()
            talker.join()

    @contextmanager
    def starting(self, verb: str, seconds: float = IMPORTS) -> Iterator[None]:
        """Write that ``verb`` has begun if it has written nothing after its first ``seconds``."""
        began = self._last

        def say() -> None:
            if self._last == began:
                self.say(f"{verb:<12} loading libraries")

        timer = threading.Timer(seconds, say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _shown(self, outermost: bool) -> Iterator[None]:
        if self.style != "live" or self.quiet or not outermost:
            yield
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self.stream, force_terminal=True, highlight=False)
        live = Live(
            Board(lambda: self._phase), console=console, transient=True, refresh_per_second=4,
            redirect_stdout=self._stream is None, redirect_stderr=self._stream is None,
        )  # fmt: skip
        with live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def progress(self, done: float, total: float, note: str = "") -> None:
        phase = self._phase
        if phase is None:
            return
        phase.done, phase.total, phase.note = done, total, note
        now = time.monotonic()
        if self.style == "live" or now - self._told < EVERY or done >= total:
            return
        self._told = now
        share = done / total if total else 0.0
        self.say(f"{phase.name:<12} {100 * share:.0f} %{'  ' + note if note else ''}")

    def show(self, rows: list[tuple[str, str, str, str]]) -> None:
        if self._phase is not None:
            self._phase.rows = rows

    def status(self, lines: list[str]) -> None:
        """Set what other processes are doing, a line each."""
        if self._phase is not None:
            self._phase.status = lines

    # -- what libraries write -----------------------------------------------------------------

    @contextmanager
    def log_to(self, path: Path) -> Iterator[None]:
        """Append all other output to standard output and standard error to ``path``.

        Without ``capture``, or inside another ``log_to``, nothing changes.
        """
        if not self.capture or self._stream is not None:
            yield
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        saved = os.dup(1), os.dup(2)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._stream = console = os.fdopen(
            os.dup(saved[1]), "w", encoding="utf-8", errors="backslashreplace"
        )
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            for descriptor, old in zip((1, 2), saved, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            self._stream = None
            console.close()


class Records(logging.Handler):
    """Shows this package's log records on the terminal; others go to standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, console = self.format(record), terminal()
        warning = record.levelno >= logging.WARNING
        if record.name.partition(".")[0] != OWN:
            print(text, file=sys.stderr)
        elif not warning:
            console.say(text)
        elif text not in self._warned:
            self._warned.add(text)
            marked = text.startswith("WARNING")
            console.say(text if marked else f"warning: {text}", "warning")


def whole_words(text: str, width: int) -> str:
    """``text`` with lines wider than ``width`` broken between words and indented."""
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )


def curve(values: list[float], width: int = 24) -> str:
    """The last ``width`` values as a line of blocks; values that are not finite are gaps."""
    last_values = values[-width:]
    finite_values = [value for value in last_values if math.isfinite(value)]
    if len(finite_values) < 2:
        return ""
    low, span = min(finite_values), max(finite_values) - min(finite_values)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(
        " " if not math.isfinite(v) else blocks[round(7 * (v - low) / span)] if span else blocks[3]
        for v in last_values
    )


_terminal = Terminal()


def terminal() -> Terminal:
    """The terminal of this process."""
    return _terminal


def use_terminal(chosen: Terminal) -> Terminal:
    """Make ``chosen`` the terminal of this process and return the previous one."""
    global _terminal
    previous, _terminal = _terminal, chosen
    return previous
