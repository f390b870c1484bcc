"""What runs inside the sandbox; standard library only, imported there as a top-level module.

Two roles, always in two different sandboxes:

- ``worker`` executes generated code and answers calls to it. It never sees a test or a nonce.
- ``checker`` executes the tests, which call the generated functions through messages, and prints
  the nonce after the last test. Generated code never runs there.

What comes back from the worker is plain data in tagged JSON, so an object that claims to equal
everything arrives as an opaque handle that equals nothing but itself.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, cast

MAX_DEPTH = 200


def encode(value: Any, keep: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """Turn plain data into tagged JSON; anything else into a handle made by ``keep``."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Remote):
        return {"o": value._remote_id}
    if isinstance(value, int):
        return {"i": hex(int(value))}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(v, keep, depth + 1) for v in value]}
    if isinstance(value, dict):
        items = [[encode(k, keep, depth + 1), encode(v, keep, depth + 1)] for k, v in value.items()]
        return {"d": items}
    if keep is None:
        raise TypeError(f"a {type(value).__name__} cannot be passed to generated code")
    return {"o": keep(value)}


def decode(value: Any, resolve: Callable[[int], Any]) -> Any:
    """Undo :func:`encode`; ``resolve`` turns a handle's number into an object."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "c":
        return complex(*map(float.fromhex, content))
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "d":
        return {decode(k, resolve): decode(v, resolve) for k, v in content}
    if tag == "o":
        return resolve(int(content))
    kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
    return kind(decode(v, resolve) for v in content)


class Remote:
    """In the checker: a stand-in for an object that lives in the worker."""

    def __init__(self, ask: Callable[..., Any], number: int):
        object.__setattr__(self, "_remote_ask", ask)
        object.__setattr__(self, "_remote_id", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the worker."""
        return self._remote_ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._remote_ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_ask("getitem", self, key)

    def __iter__(self) -> Any:
        return iter(self._remote_ask("list", self))

    def __len__(self) -> int:
        return len(self._remote_ask("list", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._remote_id == self._remote_id

    def __hash__(self) -> int:
        return hash(self._remote_id)


def _send(stream: BinaryIO, message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _read_line(reader: BinaryIO) -> bytes:
    """Read up to a line's end; messages alternate, so nothing follows it in the pipe."""
    pieces: list[bytes] = []
    while not pieces or not pieces[-1].endswith(b"\n"):
        piece = reader.read(1 << 16)
        if not piece:
            return b""
        pieces.append(piece)
    return b"".join(pieces)


def _channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the message channel off fds 0-2, which code that prints or reads would disturb."""
    # Unbuffered reading: the checker's forks share the pipe, and no byte may stay in one of them.
    reader = cast(BinaryIO, os.fdopen(os.dup(0), "rb", buffering=0))
    writer = os.fdopen(os.dup(1), "wb")
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return reader, writer


def _limit(limits: dict[str, int]) -> None:
    if limits.get("uid"):
        # Started by root: limits on processes bind only a user that is not root.
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    memory = limits["memory_bytes"]
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    if limits.get("processes"):
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    home = os.environ.get("HOME", "/")
    os.chdir(home if os.path.isdir(home) else "/")


def _describe(error: BaseException) -> list[str]:
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return [type(error).__name__[:100], text]


def worker(limits: dict[str, int]) -> None:
    """Execute the first message's code, then answer operations on what it defined."""
    reader, writer = _channel()
    _limit(limits)
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    namespace: dict[str, Any] = {"__name__": "__program__", "__builtins__": builtins}
    while line := _read_line(reader):
        try:
            message = json.loads(line)
            operation, arguments = message["op"], message.get("args", [])
            arguments = [decode(a, objects.__getitem__) for a in arguments]
            if operation == "load":
                exec(compile(arguments[0], "<program>", "exec"), namespace)
                names = arguments[1]
                value: Any = {n: keep(namespace[n]) for n in names if n in namespace}
            elif operation == "call":
                value = arguments[0](*arguments[1], **arguments[2])
            elif operation == "list":
                value = list(arguments[0])
            elif operation == "getitem":
                value = arguments[0][arguments[1]]
            elif operation in ("getattr", "setattr"):
                value = getattr(builtins, operation)(*arguments)
            else:
                raise ValueError(operation)
            reply = {"value": encode(value, keep)}
        except BaseException as error:  # SystemExit and KeyboardInterrupt are failures here
            reply = {"error": _describe(error)}
        _send(writer, reply)


def checker(limits: dict[str, int]) -> None:
    """Run each job's tests in a fork of this process."""
    reader, writer = _channel()
    _limit(limits)
    while line := _read_line(reader):
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(job["seconds"] + 1)
            try:
                _check(job, reader, writer)
                final: Any = {"done": job["nonce"]}
            except BaseException as error:
                final = {"failed": _describe(error)}
            _send(writer, final)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            _send(writer, {"failed": ["Killed", "the tests were stopped"]})


def _check(job: dict[str, Any], reader: Any, writer: BinaryIO) -> None:
    def ask(operation: str, *arguments: Any) -> Any:
        _send(writer, {"op": operation, "args": [encode(a) for a in arguments]})
        reply = json.loads(_read_line(reader))
        if "error" in reply:
            name, text = reply["error"]
            known = getattr(builtins, name, None)
            usable = isinstance(known, type) and issubclass(known, Exception)
            raise (cast(type[Exception], known) if usable else RuntimeError)(text)
        return decode(reply["value"], lambda number: Remote(ask, number))

    namespace: dict[str, Any] = {"__name__": "__tests__"}
    exec(compile(job["setup"], "<setup>", "exec"), namespace)
    tests = compile(job["tests"], "<tests>", "exec")
    used = {n.id for n in ast.walk(ast.parse(job["tests"])) if isinstance(n, ast.Name)}
    wanted = sorted((used - set(namespace) - set(dir(builtins))) | set(job["entry"]))
    defined = ask("load", job["code"], wanted)
    for name, number in defined.items():
        namespace[name] = Remote(ask, number)
    missing = [name for name in job["entry"] if name not in defined]
    if missing:
        raise NameError(f"the program does not define {missing[0]}")
    exec(tests, namespace)


def main() -> None:
    """Start the role named on the command line."""
    limits = json.loads(sys.argv[2])
    {"worker": worker, "checker": checker}[sys.argv[1]](limits)
