"""Run generated programs against tests, so that they can neither do harm nor fake success.

Threat model. The program is hostile: it may read, allocate, start threads, send signals, try the
network, walk frames, patch modules, exit early, print anything, and answer the tests' questions in
place of the runner. It runs in its own sandbox, which is destroyed as a whole: namespaces without
network, a read-only file system of Python and libraries, one process whose only memory is its
address space, limits on threads, files, processor time and wall clock, and a filter of system
calls.

The tests run in *another* sandbox and reach the program only by messages of plain data. After the
last test that process prints a random number, which this process chose. The program shares no
process, process table or file with the tests or that number, so it has nothing to read or patch.
The tests accept from it only answers, in exact built-in types, to calls of the required names, so
it can pass only by answering those calls with the right values. Not covered: faults of the kernel,
and programs that recognize the tests' arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from moe_finetune.evaluation.sandbox.names import required_names
from moe_finetune.evaluation.sandbox.policy import (
    Limits,
    environment,
    image,
    refuse,
    unusable,
)
from moe_finetune.evaluation.sandbox.process import SandboxProcess, Stopped

__all__ = ["Limits", "Program", "Sandbox", "Verdict"]


@dataclass(frozen=True)
class Program:
    """A program and its tests.

    Attributes:
        code: generated code, complete with imports.
        setup: trusted source that the tests need (imports, helpers of the task).
        entry: names that the program must define; the tests see no other names. Default: names that
            the tests use and that neither they, the set-up nor Python define.
    """

    code: str
    tests: str
    setup: str = ""
    entry: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Whether all tests passed, and if not, why."""

    passed: bool
    reason: str
    seconds: float


_PROBES = (
    (Program("def f(x):\n    return x + 1", "assert f(2) == 3", entry=("f",)), True),
    (Program("def f(x):\n    return x", "assert f(2) == 3", entry=("f",)), False),
)
# What the isolation must forbid. A program tries each, since an accepted flag proves nothing.
_FORBIDDEN = {
    "write a file": "open(os.path.join(os.environ.get('HOME', '/'), 'x'), 'w')",
    "write outside": "open('/outside', 'w')",
    "reach the network": "socket.create_connection(('1.1.1.1', 53), 0.2)",
}
_FORBIDDEN_BY_FILTER = {
    "open a network socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "start a process": "os.fork() or os._exit(1)",
    "take memory outside the limit": "os.memfd_create('x')",
}
_ATTEMPT = """
def attempt():
    import os, socket
    try:
        {action}
    except (OSError, AttributeError):
        return 'refused'
"""


def trouble(kind: str) -> str:
    """The error of docker or podman, or of its image; "" if it works."""
    if kind == "bubblewrap":
        return ""
    for query in (["info"], ["image", "inspect", image()]):
        try:
            answer = subprocess.run(
                [kind, *query], capture_output=True, text=True, env=environment(), timeout=30
            )
        except subprocess.TimeoutExpired:
            return f"'{kind} {' '.join(query)}' does not answer"
        if answer.returncode:
            return (answer.stderr.strip() or "no message").splitlines()[-1]
    return ""


class Sandbox:
    """An isolation that passed its probes at the start.

    Args:
        allow_unsafe_local: if no isolation works, run programs with the user's rights and only
            resource limits, which is dangerous.
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
        self._checkers: SimpleQueue[SandboxProcess] = SimpleQueue()
        # A sandbox ends with the thread that started it, so reused ones need a permanent thread.
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
        if reason := unusable(kind):
            return reason
        self.kind = kind
        for program, expected in _PROBES:
            try:
                verdict = self.run(program)
            except FileNotFoundError:
                return "not installed"
            if verdict.passed is not expected:
                self.close()
                reason = trouble(kind) or verdict.reason or "a wrong program passed"
                return f"the probe failed ({reason})"
        forbidden = _FORBIDDEN | (_FORBIDDEN_BY_FILTER if kind == "bubblewrap" else {})
        for name, action in forbidden.items():
            code = _ATTEMPT.format(action=action)
            attempt = Program(code, "assert attempt() == 'refused'", entry=("attempt",))
            if not self.run(attempt).passed:
                self.close()
                return f"a program in it could {name}"
        return None

    def run(self, program: Program) -> Verdict:
        started = time.monotonic()
        deadline = started + self.limits.seconds
        worker = SandboxProcess(self.kind, "worker", self.limits)
        checker = None
        healthy = False
        try:
            checker = self._checker()
            reason = self._relay(program, worker, checker, deadline)
            healthy = True
        except Stopped as stop:
            reason = str(stop)
        finally:
            worker.kill()
            if checker is not None:
                self._checkers.put(checker) if healthy else checker.kill()
        return Verdict(reason == "", reason, time.monotonic() - started)

    def run_all(self, programs: Iterable[Program], workers: int | None = None) -> list[Verdict]:
        """Run many programs in parallel; verdicts in the order of ``programs``."""
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            return list(pool.map(self.run, programs))

    def _checker(self) -> SandboxProcess:
        with contextlib.suppress(Empty):
            while True:
                checker = self._checkers.get_nowait()
                if checker.process.poll() is None:
                    return checker
                checker.kill()
        return self._spawner.submit(SandboxProcess, self.kind, "checker", self.limits).result()

    def _relay(
        self, program: Program, worker: SandboxProcess, checker: SandboxProcess, deadline: float
    ) -> str:
        """Relay messages between tests and program; return "" or why the program failed."""
        nonce = secrets.token_hex(16)
        job = {
            "code": program.code,
            "setup": program.setup,
            "tests": program.tests,
            "entry": list(program.entry or required_names(program.tests, program.setup)),
            "nonce": nonce,
            "seconds": self.limits.seconds,
        }
        checker.send(json.dumps(job).encode(), deadline)
        while True:
            line = checker.receive(deadline)
            try:
                message: dict[str, Any] = json.loads(line)
            except ValueError:  # killed in the middle of a line
                raise Stopped("the tests were stopped") from None
            if "done" in message:
                return "" if secrets.compare_digest(message["done"], nonce) else "forged"
            if "failed" in message:
                return ": ".join(part for part in message["failed"] if part)
            if not worker.silent():
                raise Stopped("the program answered what was not asked")
            worker.send(line, deadline)
            checker.send(worker.receive(deadline), deadline)

    def close(self) -> None:
        """Stop the checkers that are kept for further programs."""
        with contextlib.suppress(Empty):
            while True:
                self._checkers.get_nowait().kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
