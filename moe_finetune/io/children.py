"""Child processes: signals are passed on to them, and their output is logged."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from moe_finetune.io.terminal import terminal

INTERRUPTED = 130
POLL = 0.1
"""Seconds between looks at running processes."""
MACHINE_FAILURE = 1
"""Exit code of this package's commands if memory or disk is the cause."""
STOP_SECONDS = 20.0
"""Time to end for a process that has nothing to save."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: a forked process may not take the loader's lock
_USUAL_CAUSES = {
    signal.SIGKILL: "usually because memory ran out",
    signal.SIGXCPU: "usually because a chat template does not end",
}


@dataclass(frozen=True)
class Failure:
    """Why a process failed; ``machine`` if memory, disk or a signal ended it, not its input."""

    reason: str
    machine: bool = False

    def __str__(self) -> str:
        return self.reason


class Children:
    """Running processes, each in its own session, so that Ctrl-C reaches it once, through us.

    ``asked`` are the signals received. ``servers`` save nothing, so they end within
    ``STOP_SECONDS`` of a signal, and when this process is killed.
    """

    def __init__(self, servers: bool = False) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.asked: list[int] = []
        self.servers = servers

    def start(self, name: str, command: Sequence[str], log: Path) -> int:
        """Start a process that appends its output to ``log``; return the log's size before."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            log_start = stream.tell()
            self.popen(name, command, stdout=stream, stderr=subprocess.STDOUT)
        return log_start

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process with ``options`` of ``subprocess.Popen``."""
        with_us = partial(_end_with, os.getpid()) if self.servers else None
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=with_us,
            **options,
        )
        self.running[name] = process
        for signum in self.asked:  # it came while the process was starting
            process.send_signal(signum)
        return process

    def ended(self) -> Iterator[tuple[str, int]]:
        for name, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[name]
                yield name, code

    def send(self, signum: int) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signum)

    def note(self, signum: int, frame: FrameType | None = None) -> None:
        """Signal handler: record the signal and pass it on."""
        self.asked.append(signum)
        self.send(signum)

    def wait(self) -> None:
        """Wait until all have ended; kill servers, and what they started, that take too long."""
        end = time.monotonic() + STOP_SECONDS
        for process in self.running.values():
            try:
                process.wait(max(0.0, end - time.monotonic()) if self.servers else None)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _end_with(parent: int) -> None:
    """Let the kernel kill this new process when the thread that started it ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def children(servers: bool = False) -> Iterator[Children]:
    """Start processes inside; SIGINT and SIGTERM are passed on to them.

    On exit, processes that still run are stopped and awaited; if a signal came, KeyboardInterrupt
    is raised then. The thread that starts ``servers`` must outlive them.
    """
    group = Children(servers)
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {n: signal.signal(n, group.note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield group
    finally:
        if not group.asked:
            group.send(signal.SIGTERM)
        group.wait()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if group.asked:
        raise KeyboardInterrupt


def _nothing() -> None: ...


def run_child(
    command: Sequence[str], log: Path, watch: Callable[[], None] = _nothing
) -> Failure | None:
    """Run one process to its end; return why it failed, or None.

    ``watch`` is called again and again while it runs.
    """
    with children() as group:
        log_start = group.start("child", command, log)
        while (code := group.running["child"].poll()) is None:
            watch()
            time.sleep(POLL)
    return None if code == 0 else failure(log, log_start, code)


def run_children(
    commands: Mapping[str, Sequence[str]],
    logs: Path,
    at_once: int,
    watch: Callable[[], None] = _nothing,
) -> Failure | None:
    """Run processes, ``at_once`` at a time; return the first failure, or None.

    After a failure no more are started, and those that run are asked to save and stop. The output
    of NAME is appended to ``logs/NAME.log``; ``watch`` is called again and again.
    """
    waiting, begun = list(commands), dict[str, int]()
    with children() as group:
        while (waiting or group.running) and not group.asked:
            while waiting and len(group.running) < at_once:
                name = waiting.pop(0)
                begun[name] = group.start(name, commands[name], logs / f"{name}.log")
            for name, code in group.ended():
                if code == INTERRUPTED:
                    group.note(signal.SIGTERM)
                elif code:
                    reason = failure(logs / f"{name}.log", begun[name], code)
                    terminal().say(f"{name} failed; stopping the others", "warning")
                    return Failure(f"{name}: {reason}", reason.machine)
            watch()
            time.sleep(POLL)
    return None


def failure(log: Path, start: int, code: int) -> Failure:
    """Why a process failed: its ``error:`` message, else its last line, and the exit code."""
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode("utf-8", "replace").splitlines()
    machine = (code < 0 and code != -signal.SIGXCPU) or code == MACHINE_FAILURE
    ended = how_it_ended(code)
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        message = "\n".join(lines[errors[-1] :]).removeprefix("error: ").strip()
        return Failure(message if code > 0 else f"{ended}: {message}", machine)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return Failure(f"{ended}: {last} (log: {log})", machine)


def how_it_ended(code: int) -> str:
    """An exit code other than 0, or the signal that it stands for, in words."""
    if code > 0:
        return f"exit code {code}"
    signum = signal.Signals(-code)
    cause = f" ({_USUAL_CAUSES[signum]})" if signum in _USUAL_CAUSES else ""
    return f"killed by {signum.name}{cause}"
