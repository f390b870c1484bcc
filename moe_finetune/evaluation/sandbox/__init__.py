"""Run generated programs against tests where they can do no harm and cannot forge success.

Threat model. The program is hostile: it may read, write, fork, allocate, signal, talk to the
network, walk frames, patch modules, exit early, print anything. It runs in a sandbox of its own
(namespaces without network, read-only system files, an empty home in memory, limits on memory,
processes, files, CPU and wall clock) that is destroyed as a whole. The tests run in *another*
sandbox and reach the program only by messages of plain data; only after the last test does that
process print a random number that this one chose. The program never shares a process, a process
table or a file with the tests or with that number, so there is nothing it could read or patch; it
can pass only by answering the tests' calls with the right values. Not covered: faults of the
kernel, and programs that recognise the tests' arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from moe_finetune.evaluation.sandbox.policy import Limits, command, environment, image, refuse

__all__ = ["Limits", "Program", "Sandbox", "Verdict"]


@dataclass(frozen=True)
class Program:
    """A program and its tests.

    Attributes:
        code: generated code, complete with imports.
        tests: the tests' source; names that it uses and does not define are the program's.
        setup: trusted source that the tests need (imports, helpers of the task).
        entry: names that the program must define.
    """

    code: str
    tests: str
    setup: str = ""
    entry: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Whether all tests passed; otherwise why not, in words."""

    passed: bool
    reason: str
    seconds: float


class _Stopped(Exception):
    """The program or its tests cannot go on; the text is the verdict's reason."""


class _Process:
    """One sandboxed process with line messages over its stdin and stdout."""

    def __init__(self, kind: str, role: str, limits: Limits):
        self.process = subprocess.Popen(
            command(kind, role, limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd="/",
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._buffer = b""
        self._cap = limits.reply_bytes

    def send(self, line: bytes, deadline: float) -> None:
        view = memoryview(line + b"\n")
        while view:
            self._wait(self._in, selectors.EVENT_WRITE, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, OSError):
                raise _Stopped("the program ended early") from None

    def receive(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            self._wait(self._out, selectors.EVENT_READ, deadline)
            try:
                piece = os.read(self._out, 1 << 16)
            except BlockingIOError:
                continue
            if not piece:
                raise _Stopped("the program ended early")
            self._buffer += piece
            if len(self._buffer) > self._cap:
                raise _Stopped("an answer was too large")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        with selectors.PollSelector() as selector:
            selector.register(fd, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _Stopped("out of time")

    def kill(self) -> None:
        """Kill the whole sandbox and wait until nothing of it holds the pipe any more."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 5
        with contextlib.suppress(_Stopped, OSError):
            while True:
                self._wait(self._out, selectors.EVENT_READ, deadline)
                if not os.read(self._out, 1 << 16):
                    break
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


_PROBES = (
    (Program("def f(x):\n    return x + 1", "assert f(2) == 3", entry=("f",)), True),
    (Program("def f(x):\n    return x", "assert f(2) == 3", entry=("f",)), False),
    (
        Program(
            "def f():\n"
            "    import os, socket\n"
            "    try:\n"
            "        open('/outside', 'w')\n"
            "        return False\n"
            "    except OSError:\n"
            "        pass\n"
            "    try:\n"
            "        socket.create_connection(('1.1.1.1', 53), 0.2)\n"
            "        return False\n"
            "    except OSError:\n"
            "        return len(os.listdir('/home')) == 0 if os.path.isdir('/home') else True",
            "assert f() is True",
            entry=("f",),
        ),
        True,
    ),
)


def trouble(kind: str) -> str:
    """What docker or podman says is wrong with itself or the image; "" where it is not that."""
    if kind == "bubblewrap":
        return ""
    for asked in (["info"], ["image", "inspect", image()]):
        try:
            found = subprocess.run(
                [kind, *asked], capture_output=True, text=True, env=environment(), timeout=30
            )
        except subprocess.TimeoutExpired:
            return f"'{kind} {' '.join(asked)}' does not answer"
        if found.returncode:
            return (found.stderr.strip() or "no message").splitlines()[-1]
    return ""


class Sandbox:
    """Isolation that was tried at start with real programs.

    Args:
        limits: what each program may use.
        allow_unsafe_local: where no isolation works, run programs with the user's own rights and
            only resource limits. Dangerous; never the default.
        kinds: isolations to try, in this order.

    Attributes:
        kind: ``"bubblewrap"``, ``"docker"``, ``"podman"`` or ``"unsafe-local"``.

    Raises:
        DependencyError: no isolation works here and ``allow_unsafe_local`` is off.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        allow_unsafe_local: bool = False,
        kinds: Iterable[str] = ("bubblewrap", "docker", "podman"),
    ):
        self.limits = limits or Limits()
        self._checkers: SimpleQueue[_Process] = SimpleQueue()
        # A sandbox dies with the thread that started it; kept ones need a thread that stays.
        self._spawner = ThreadPoolExecutor(1)
        reasons = []
        for kind in kinds:
            reason = self._probe(kind)
            if reason is None:
                return
            reasons.append(f"{kind}: {reason}")
        if not allow_unsafe_local:
            raise refuse(reasons)
        print("running generated programs WITHOUT a sandbox", file=sys.stderr)
        self.kind = "unsafe-local"

    def _probe(self, kind: str) -> str | None:
        if kind == "bubblewrap" and not sys.platform.startswith("linux"):
            return f"not on {sys.platform}"
        self.kind = kind
        for program, expected in _PROBES:
            try:
                verdict = self.run(program)
            except FileNotFoundError:
                return "not installed"
            if verdict.passed is not expected:
                self.close()
                reason = trouble(kind) or verdict.reason or "it reached outside"
                return f"the probe failed ({reason})"
        return None

    def run(self, program: Program) -> Verdict:
        """Run one program against its tests."""
        started = time.monotonic()
        deadline = started + self.limits.seconds
        worker = _Process(self.kind, "worker", self.limits)
        checker = None
        healthy = False
        try:
            checker = self._checker()
            reason = self._relay(program, worker, checker, deadline)
            healthy = True
        except _Stopped as stop:
            reason = str(stop)
        finally:
            worker.kill()
            if checker is not None:
                self._checkers.put(checker) if healthy else checker.kill()
        return Verdict(reason == "", reason, time.monotonic() - started)

    def run_all(self, programs: Iterable[Program], workers: int | None = None) -> list[Verdict]:
        """Run many programs side by side; verdicts in the order of ``programs``."""
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            return list(pool.map(self.run, programs))

    def _checker(self) -> _Process:
        with contextlib.suppress(Empty):
            while True:
                kept = self._checkers.get_nowait()
                if kept.process.poll() is None:
                    return kept
                kept.kill()
        return self._spawner.submit(_Process, self.kind, "checker", self.limits).result()

    def _relay(self, program: Program, worker: _Process, checker: _Process, deadline: float) -> str:
        """Carry messages between tests and program; return '' or why the program failed."""
        nonce = secrets.token_hex(16)
        job = {
            "code": program.code,
            "setup": program.setup,
            "tests": program.tests,
            "entry": list(program.entry),
            "nonce": nonce,
            "seconds": self.limits.seconds,
        }
        checker.send(json.dumps(job).encode(), deadline)
        while True:
            line = checker.receive(deadline)
            message: dict[str, Any] = json.loads(line)
            if "done" in message:
                return "" if secrets.compare_digest(message["done"], nonce) else "forged"
            if "failed" in message:
                return ": ".join(part for part in message["failed"] if part)
            worker.send(line, deadline)
            checker.send(worker.receive(deadline), deadline)

    def close(self) -> None:
        """Stop the processes that are kept between programs."""
        with contextlib.suppress(Empty):
            while True:
                self._checkers.get_nowait().kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
