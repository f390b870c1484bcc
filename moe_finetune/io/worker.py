"""A separate process that runs calls one after the other while this one continues.

Expensive imports happen there once, and its threads, signals and memory stay separate. Its output
goes to a file; this package's warnings are also returned with the answer and shown here.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io.children import failure
from moe_finetune.io.terminal import Records, Terminal, terminal, use_terminal

P = ParamSpec("P")
T = TypeVar("T")
_START = (
    "from moe_finetune.plugins import use_inherited; use_inherited(); "
    "from moe_finetune.io.worker import serve; serve({})"
)


class WorkerError(MoeFinetuneError, RuntimeError):
    """A call ended its process, or raised an error that no user can fix."""


class Pending(Generic[T]):
    """A call that the worker has received."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._answer: tuple[bool, Any] | None = None

    def result(self) -> T:
        """Wait for the call and return its result.

        Raises:
            MoeFinetuneError: the error that the call raised.
            WorkerError: it raised something else (its traceback is in the log), or the process
                ended.
        """
        while self._answer is None:
            self._worker.take_next()
        done, value = self._answer
        if not done:
            raise value
        return value


class Worker:
    """Starts the process immediately; leaving the context ends it, even in the middle of a call.

    Args:
        log: file to which its output is appended.
        environment: variables that override ours.
    """

    def __init__(self, log: Path, environment: Mapping[str, str] | None = None):
        self._log = log
        self._waiting: list[Pending[Any]] = []
        ours, child_end = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with child_end, log.open("ab") as stream:
            self._begun = stream.tell()
            # In its own session: Ctrl-C reaches it through us, when we leave the context.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(),),
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        """Submit a call of a module-level function; calls run in order."""
        pending = Pending[T](self)
        self._waiting.append(pending)
        with suppress(BrokenPipeError):  # the process has ended; result() says why
            self._connection.send((function, args, kwargs))
        return pending

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.begin(function, *args, **kwargs).result()

    def take_next(self) -> None:
        """Wait for the answer to the oldest call."""
        oldest = self._waiting.pop(0)
        try:
            done, value, warnings = self._connection.recv()
            oldest._answer = done, value
            for warning in warnings:
                terminal().say(warning, "warning")
        except (EOFError, ConnectionResetError):
            reason = failure(self._log, self._begun, self._process.wait())
            oldest._answer = False, WorkerError(f"the process that did it ended: {reason}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        if self._waiting:  # nobody will read the answer
            self._process.terminate()
        self._process.wait()


class _WarningsKept(Terminal):
    """Writes into the log, and keeps warnings for the caller."""

    warnings: list[str]

    def say(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Write a line."""
        super().say(text, level)
        if level == "warning":
            self.warnings.append(text)


def serve(descriptor: int) -> None:
    """Run incoming calls until the other side is gone."""
    console = _WarningsKept("plain")
    use_terminal(console)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[Records()])
    connection = Connection(descriptor)
    while True:
        console.warnings = []
        try:
            function, args, kwargs = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = True, function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            expected = isinstance(error, MoeFinetuneError) and _travels(error)
            answer = False, error if expected else WorkerError(f"{type(error).__name__}: {error}")
        try:
            connection.send((*answer, console.warnings))
        except BrokenPipeError:
            return


def _travels(error: Exception) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # an exception's constructor may raise anything
        return False
