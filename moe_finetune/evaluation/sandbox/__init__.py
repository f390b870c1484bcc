"""Run generated programs against tests, so that they can neither do harm nor fake success.

Threat model. The program is hostile: it may read, allocate, start threads, send signals, try the
network, walk frames, patch modules, exit early, print anything, and answer the tests' questions in
place of the runner. It runs in its own sandbox (bubblewrap), which is destroyed as a whole:
namespaces without network, a read-only file system of Python and libraries, one process whose only
memory is its address space, limits on threads, files, processor time and wall clock, and a filter
of system calls.

The tests run in *another* sandbox and reach the program only by messages of plain data. After the
last test that process prints a random number, which this process chose. The program shares no
process, process table or file with the tests or that number, so it has nothing to read or patch.
The tests accept from it only answers, in exact built-in types, to calls of the required names, so
it can pass only by answering those calls with the right values. Not covered: faults of the kernel,
and programs that recognize the tests' arguments.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.sandbox.names import required_names
from moe_finetune.evaluation.sandbox.seccomp import filter_descriptor

RUNNER = Path(__file__).resolve().parent
_START = "import sys; sys.path.insert(0, {!r}); import runner; runner.main()"
# One user ID per process, because limits count a user's processes in all sandboxes. The start is
# random, so that two runs on one machine do not count together.
_USERS = itertools.count(1_000_000_000 + secrets.randbelow(1_000_000_000))
REFUSAL = (
    "generated programs run only in a sandbox, and none works here: bubblewrap: {}. Install "
    "bubblewrap and libseccomp (apt-get install bubblewrap libseccomp2), score the samples on such "
    "a machine ('moe-finetune eval' writes them in any case), or accept the risk with "
    "--allow-unsafe-local, for example in a container that is used for nothing else"
)


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: wall clock for the program and its tests.
        processes: number of threads; a sandboxed program cannot start processes.
        file_bytes: maximum size of a file it writes, if it can write at all (without a sandbox).
        reply_bytes: longest answer to one call.
    """

    seconds: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 8
    file_bytes: int = 1 << 20
    open_files: int = 64
    reply_bytes: int = 8 << 20


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


class Sandbox:
    """bubblewrap, which passed its probes at the start.

    Args:
        allow_unsafe_local: if bubblewrap does not work, run programs with the user's rights and
            only resource limits, which is dangerous.

    Attributes:
        kind: ``"bubblewrap"`` or ``"unsafe-local"``.
    """

    def __init__(self, limits: Limits | None = None, allow_unsafe_local: bool = False):
        self.limits, self.kind = limits or Limits(), "bubblewrap"
        reason = self._problem()
        if reason and not allow_unsafe_local:
            raise DependencyError(REFUSAL.format(reason))
        if reason:
            print("running generated programs WITHOUT a sandbox", file=sys.stderr)
            self.kind = "unsafe-local"

    def _problem(self) -> str:
        """Why bubblewrap cannot be used; "" if it can."""
        if not sys.platform.startswith("linux"):
            return f"not on {sys.platform}"
        if shutil.which("bwrap") is None:
            return "not installed"
        try:
            os.close(filter_descriptor())
        except OSError as error:
            return f"no filter of system calls ({error})"
        for program, passes in _PROBES:
            verdict = self.run(program)
            if verdict.passed is not passes:
                reason = self._complaint() or verdict.reason or "a wrong program passed"
                return f"the probe failed ({reason})"
        return ""

    def _complaint(self) -> str:
        """The last line of bubblewrap's own message, where it does not start a program."""
        process = self._start("worker", subprocess.PIPE)
        _, message = process.communicate()
        return (message.decode(errors="replace").strip().splitlines() or [""])[-1]

    def run(self, program: Program) -> Verdict:
        """Run one program; its sandboxes are destroyed as a whole."""
        entry = list(program.entry or required_names(program.tests, program.setup))
        job = {"code": program.code, "setup": program.setup, "tests": program.tests}
        started, late = time.monotonic(), threading.Event()
        processes: list[subprocess.Popen[bytes]] = []

        def end() -> None:
            late.set()
            _kill(processes)

        timer = threading.Timer(self.limits.seconds, end)
        timer.start()
        try:
            processes += [self._start("worker")]
            processes += [self._start("checker")]
            reason = self._relay({**job, "entry": entry}, *processes)
        except (OSError, ValueError):  # a closed pipe, or half a line
            reason = "the program ended early"
        finally:
            timer.cancel()
            _kill(processes)
            for process in processes:
                _close(process)
        if late.is_set():
            reason = "out of time"
        return Verdict(reason == "", reason, time.monotonic() - started)

    def run_all(self, programs: Iterable[Program], workers: int | None = None) -> list[Verdict]:
        """Run many programs in parallel; verdicts in the order of ``programs``."""
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            return list(pool.map(self.run, programs))

    def _relay(
        self,
        job: dict[str, Any],
        worker: subprocess.Popen[bytes],
        checker: subprocess.Popen[bytes],
    ) -> str:
        """Relay messages between tests and program; return "" or why the program failed."""
        nonce, longest = secrets.token_hex(16), self.limits.reply_bytes
        assert worker.stdout is not None and checker.stdout is not None
        _send(checker, json.dumps({**job, "nonce": nonce}).encode() + b"\n")
        while line := checker.stdout.readline():
            message = json.loads(line)
            if "done" in message:
                return "" if secrets.compare_digest(message["done"], nonce) else "forged"
            if "failed" in message:
                return str(message["failed"])
            _send(worker, line)
            answer = worker.stdout.readline(longest)
            if not answer.endswith(b"\n"):
                too_large = len(answer) >= longest
                return "an answer was too large" if too_large else "the program ended early"
            _send(checker, answer)
        return "the tests were stopped"

    def _start(self, role: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start ``role`` ("worker" or "checker") with pipes to talk to it."""
        boxed = self.kind == "bubblewrap"
        root = os.getuid() == 0
        limits = self.limits
        own_limits = {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_CPU": limits.seconds + 1,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            # Without isolation, a limit on processes would count all of the user's.
            **({"RLIMIT_NPROC": limits.processes} if boxed else {}),
            "uid": next(_USERS) if boxed and root else None,
        }
        start = _START.format("/runner" if boxed else str(RUNNER))
        prefix = Path(sys.base_prefix).resolve()  # outside any virtual environment
        python = str(prefix / "bin" / f"python3.{sys.version_info.minor}") if boxed else ""
        command = [python or sys.executable, "-I", "-S", "-B", "-c", start]
        command += [role, json.dumps(own_limits)]
        # One for each process, since reading moves its position.
        filters = [filter_descriptor()] if boxed else []
        if boxed:
            command = [*_bubblewrap(prefix, root, filters[0]), *command]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
                pass_fds=filters,
            )
        finally:
            for descriptor in filters:
                os.close(descriptor)


def _bubblewrap(prefix: Path, root: bool, filters: int) -> list[str]:
    """Namespaces without network, a read-only root of Python and libraries, no capability.

    Setuid programs among them gain nothing: bubblewrap forbids new privileges.
    """
    arguments = ["bwrap", "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid"]
    arguments += ["--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"]
    arguments += ["--seccomp", str(filters)]
    if root:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    # Created here with open modes: bubblewrap's are closed to the unprivileged user.
    for parent in (*reversed(prefix.parents[:-1]), "/dev", "/etc"):
        arguments += ["--perms", "0755", "--dir", str(parent)]
    for path in dict.fromkeys(("/usr", "/lib", "/lib64", "/etc/ld.so.cache", str(prefix))):
        arguments += ["--ro-bind-try", path, path]
    for name in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", name, name]
    arguments += ["--ro-bind", str(RUNNER), "/runner", "--dir", "/home", "--remount-ro", "/"]
    return [*arguments, "--setenv", "HOME", "/home", "--chdir", "/home"]


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill whole sandboxes and wait until they are gone."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not sent
            assert stream is not None
            stream.close()
