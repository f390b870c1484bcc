"""Python programs started by a fork of a process that has imported everything.

Importing torch, transformers, PEFT and TRL takes ten seconds of a processor, and a test that
starts ``moe-finetune`` as a process waits for that each time. With the fixture ``warm``,
``subprocess.Popen([sys.executable, "-m", "moe_finetune.cli", ...])`` is forked instead from a
server that has done so. Everything else about it is as before: it is a child of the process that
started it, has a process id, session, working folder, environment and files of its own, and ends
with the same exit code or by the same signal. What such a program starts in this way itself is
forked from a server of its own.

A program stays cold when it is none of :data:`WARM`, or when its environment has another value of
a variable that is read while importing (:data:`AT_IMPORT`). Forks share their hash seed: where the
order of a set could matter, a test keeps one side cold.

How a fork of the server becomes a child of ours: the server forks twice and its own child ends, so
that the kernel looks for another parent; for that moment we are the "subreaper" that takes orphans
in (``prctl(2)``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WARM = ("moe_finetune.", "tests.", "accelerate.commands.launch.", "vllm.", "pytest.")
"""Beginnings of the names of modules that are run warm."""
CODE = ("from multiprocessing.spawn import spawn_main; ",)
"""Beginnings of what is run warm with ``-c``. The child that compares answers is not: a fork's
address space has all that was imported, and may be above the child's own limit."""
SCRIPTS = ("eval/bench/step.py", "eval/bench/memory.py")
"""Files that are run warm."""
AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "HF_HOME", "HF_HUB_", "TRANSFORMERS_",
             "CUDA_", "HOME", "XDG_", "TORCHDYNAMO_")  # fmt: skip
LATER = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Of these, what may differ. A launcher sets the first for its processes, and it is read when a
device is looked for; OpenCV sets the second, for nothing that is loaded here; vLLM sets the third
for its engines, which are slower without."""
VLLM = ("vllm", "vllm.benchmarks.serve", "vllm.entrypoints.cli.main",
        "vllm.entrypoints.openai.api_server", "vllm.model_executor.models.qwen3_moe",
        "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")  # fmt: skip
"""What programs import that serve a checkpoint."""
START = "import sys; from tests.support import warm; warm.main(*sys.argv[1:])"
_COLD = subprocess.Popen
_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("!Q")
_PATH = sys.path[1:]
_NAMES = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]


class Server:
    """Our end of a connection to the process that forks.

    Args:
        begin: what starts it, for its first order, and returns the socket to it.
        environment: the variables under which it imports.
    """

    def __init__(self, begin: Callable[[], socket.socket], environment: Mapping[str, str]):
        self._begin, self._lock = begin, threading.Lock()
        self._connection: socket.socket | None = None
        self._imported_under = _read_at_import(environment)

    @classmethod
    def begin(cls, modules: Sequence[str] = (), **variables: str) -> Server:
        """A server that ends when we do.

        Args:
            modules: what it imports besides everything of ours.
            variables: environment that it has beside ours.
        """
        environment = {**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false", **variables}

        def start() -> socket.socket:
            ours, theirs = socket.socketpair()
            with theirs:
                _COLD(
                    [sys.executable, "-c", START, str(theirs.fileno()), *modules],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                )
            return ours

        return cls(start, environment)

    def close(self) -> None:
        """Let it end."""
        if self._connection is not None:
            self._connection.close()

    def imported_under(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with that environment would have imported the same."""
        return _read_at_import(environment) == self._imported_under

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Have a process forked that does ``order``; return the id of this new child of ours."""
        body = json.dumps(order).encode()
        with self._lock, _taking_orphans_in():
            self._connection = self._connection or self._begin()
            socket.send_fds(self._connection, [_LENGTH.pack(len(body))], [*descriptors])
            self._connection.sendall(body)
            answer = _receive(self._connection, _LENGTH.size)
        assert answer, "the process that forks has ended"
        return int(_LENGTH.unpack(answer)[0])


class Popen(subprocess.Popen):
    """``subprocess.Popen`` that forks what :data:`server` can fork, and starts the rest itself."""

    server: Server

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_NAMES, values, strict=True))
        order = _order(given)
        if order is None or not self.server.imported_under(order["environment"]):
            super()._execute_child(*values)
            return
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [number if end == -1 else end for number, end in enumerate(streams)]
        passed = sorted(given["pass_fds"])
        try:
            self.pid = self.server.fork(order | {"pass": passed}, [*streams, *passed])
            self._child_created = True
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[end] for end in ends))


@contextlib.contextmanager
def forked_from(server: Server) -> Iterator[None]:
    """Meanwhile this process starts others as forks of ``server``'s."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Popen, "server", server, raising=False)
        use(patch.setattr)
        yield


def use(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let this process start others warm; ``Popen.server`` is to be set."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    replace(subprocess, "Popen", Popen)
    replace(subprocess_handler, "Popen", Popen)
    replace(util, "spawnv_passfds", _spawn)


def _spawn(
    path: Any, arguments: Sequence[Any], passed: Sequence[Any], cold: Any = util.spawnv_passfds
) -> int:
    """``multiprocessing.util.spawnv_passfds``: what its method "spawn" starts processes with."""
    given = dict.fromkeys(_NAMES) | {"args": [sys.executable, *arguments[1:]], "shell": False}
    order = _order(given)
    if order is None or not Popen.server.imported_under(order["environment"]):
        return cold(path, arguments, passed)
    descriptors = sorted(map(int, passed))
    return Popen.server.fork(order | {"pass": descriptors}, [0, 1, 2, *descriptors])


def _order(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is to be run, or None for something that is not run warm."""
    if (
        given["shell"]
        or given["executable"] is not None
        or isinstance(given["args"], (str, bytes, os.PathLike))
    ):
        return None
    head, *words = [os.fsdecode(word) for word in given["args"]]
    words = words[words[:1] == ["-B"] :]  # what the environment says already
    safe, words = words[:1] == ["-P"], words[words[:1] == ["-P"] :]
    quiet, unbuffered = words[:2] == ["-W", "ignore"], words[:1] == ["-u"]
    words = words[2 * quiet + unbuffered :]
    if head != sys.executable or len(words) < 2:
        return None
    if Path(words[0]).is_relative_to(ROOT):
        words.insert(0, "-ISP")
    kind, what, *arguments = words
    known = {
        "-m": f"{what}.".startswith(WARM),
        "-c": what.startswith(CODE),
        "-ISP": what in {str(ROOT / name) for name in SCRIPTS},
    }
    if not known.get(kind):
        return None
    environment = os.environ if given["env"] is None else given["env"]
    return {
        "kind": kind,
        "what": what,
        "arguments": arguments,
        "quiet": quiet,
        "unbuffered": unbuffered,
        "safe": safe,
        "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
        "folder": os.fsdecode(given["cwd"] or os.getcwd()),
        "session": bool(given["start_new_session"]),
        "before": pickle.dumps(given["preexec_fn"]).hex(),
    }


def main(descriptor: str, *modules: str) -> None:
    """Be the server, and in each of its forks the program that was asked for."""
    environment = dict(os.environ)
    _import_everything()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never collected is never copied
    connection = socket.socket(fileno=int(descriptor))
    order, descriptors = _serve(connection)
    while True:  # a server, again and again, until it is asked for a program
        connection.close()
        _become(order, descriptors)
        ours, connection = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            os.close(nothing)
            order, descriptors = _serve(connection)
            continue
        connection.close()
        Popen.server = Server(lambda ours=ours: ours, environment)
        use()
        break
    try:
        _run(order)
    except SystemExit as asked:
        _end(asked.code)
    _end(0)


def _import_everything() -> None:
    import moe_finetune

    for name in ("torch", "transformers", "peft", "datasets", "trl", "accelerate.commands.launch",
                 "sklearn.manifold", "matplotlib", "torch.distributed.fsdp",
                 "torch.distributed.run"):  # fmt: skip
        importlib.import_module(name)
    for found in pkgutil.walk_packages(moe_finetune.__path__, "moe_finetune."):
        # The integrations need other trainers, which are not installed here.
        if not found.name.endswith("__main__") and ".integrations." not in found.name:
            importlib.import_module(found.name)
    import tqdm
    import trl

    for trainer in ("SFTTrainer", "DPOTrainer", "KTOTrainer"):
        getattr(trl, trainer)
    # tqdm's own lock is shared between processes: one killed while it holds it would stop others.
    tqdm.tqdm.set_lock(threading.RLock())


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each order that comes. Returns in the forks alone, with what they are to do."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the programs; a server ends with its owner
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 64)
        if not head:
            os._exit(0)
        order = json.loads(_receive(connection, _LENGTH.unpack(head)[0]))
        hear, tell = os.pipe()
        begin, go = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            os.write(tell, _LENGTH.pack(os.getpid()))
            os.close(go)
            os.read(begin, 1)  # ends when the server has closed its end: we have our parent
            for number in (hear, tell, begin):
                os.close(number)
            return order, descriptors
        os.waitpid(between, 0)
        for number in (go, begin, tell, *descriptors):
            os.close(number)
        connection.sendall(os.read(hear, _LENGTH.size))
        os.close(hear)


def _become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Take on everything by which a new process differs from the one that it was forked from."""
    if order["session"]:
        os.setsid()
    if before := pickle.loads(bytes.fromhex(order["before"])):
        before()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    targets = [0, 1, 2, *order["pass"]]
    import fcntl

    above = max(targets) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for number, target in zip(moved, targets, strict=True):
        os.dup2(number, target)
        os.close(number)
    os.chdir(order["folder"])
    sys.path[:] = [*([] if order["safe"] else [order["folder"]]), *_PATH]
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["unbuffered"]:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if order["quiet"]:
        import warnings

        warnings.simplefilter("ignore")
    import numpy as np

    np.random.seed()  # from the system, as in a new process; `random` does so by itself


def _end(code: Any) -> None:
    """End as Python does after ``SystemExit(code)``, but free nothing: that takes two seconds."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader has gone
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _run(order: dict[str, Any]) -> None:
    sys.argv = [order["what"], *order["arguments"]]
    if order["kind"] == "-ISP":
        sys.path[0] = str(Path(order["what"]).parent)
        runpy.run_path(order["what"], run_name="__main__")
    elif order["kind"] == "-c":
        exec(order["what"], sys.modules["__main__"].__dict__)
    else:
        sys.modules.pop(order["what"], None)
        runpy.run_module(order["what"], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _taking_orphans_in() -> Iterator[None]:
    control = ctypes.CDLL(None, use_errno=True).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        control(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _receive(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length and (more := connection.recv(length - len(found))):
        found += more
    return found


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(AT_IMPORT) and k not in LATER}
