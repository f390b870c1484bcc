"""The code inside the sandbox: only the standard library, imported as a top-level module.

Two roles, always in two different sandboxes:

- ``worker`` executes generated code and answers calls to it. It never sees a test or a nonce.
- ``checker`` executes the tests, which call the generated functions through messages, and prints
  the nonce after the last test. Generated code never runs there.

The program controls the worker, which may write anything. So the checker accepts only answers to
its questions, in one strict format of plain data. Built-in functions, the tests' set-up and all
names are the checker's own; the program appears only as proxies under the required names.
"""

import builtins
import json
import os
import resource
import signal
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn, cast

MAX_DEPTH = 200
_SEQUENCES: dict[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in _SEQUENCES.items()}
_DICTIONARIES = (dict, Counter, OrderedDict, defaultdict)
# Raised in the tests, these would end a loop there.
_NOT_RAISED = (StopIteration, StopAsyncIteration)


class Malformed(Exception):
    """An answer in the wrong format: the program wrote it, not the runner."""


def encode(value: Any, keep: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """Turn plain data into tagged JSON; anything else into a handle made by ``keep``.

    Only exact types are data, because a subclass may override their behavior.
    """
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is Remote:
        return {"o": hex(value._remote_id)}
    if kind is int:
        return {"i": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is bytes or kind is bytearray:
        return {"b": value.hex()}
    if kind in _TAGS:
        return {_TAGS[kind]: [encode(v, keep, depth + 1) for v in value]}
    if kind in _DICTIONARIES:
        items = [[encode(k, keep, depth + 1), encode(v, keep, depth + 1)] for k, v in value.items()]
        return {"d": items}
    if keep is None:
        raise TypeError(f"a {kind.__name__} cannot be passed to generated code")
    return {"o": hex(keep(value))}


def parse(line: bytes) -> Any:
    """Read a message of the worker, in which numbers are strings and JSON numbers do not occur."""
    try:
        text = line.decode("ascii")
        return json.loads(text, parse_int=_refuse, parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)[:100]) from None


def _refuse(text: str) -> NoReturn:
    raise Malformed(f"a bare number ({text[:20]})")


def decode(value: Any, resolve: Callable[[int], Any]) -> Any:
    """Undo :func:`encode`; ``resolve`` turns a handle's number into an object.

    Raises:
        Malformed: ``value`` is anything that :func:`encode` does not write.
    """
    try:
        return _decode(value, resolve, 0)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Malformed(str(error)[:100]) from None


def _decode(value: Any, resolve: Callable[[int], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Malformed("nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise Malformed("neither a text nor a tagged value")
    ((tag, content),) = value.items()
    if tag in _SEQUENCES and isinstance(content, list):
        return _SEQUENCES[tag](_decode(v, resolve, depth + 1) for v in content)
    if tag == "d" and isinstance(content, list):
        return {_decode(k, resolve, depth + 1): _decode(v, resolve, depth + 1) for k, v in content}
    if tag == "c":
        real, imaginary = content
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if not isinstance(content, str):
        raise Malformed("a value that is not a text")
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float.fromhex(content)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "o":
        return resolve(int(content, 16))
    raise Malformed("an unknown tag")


class Remote:
    """In the checker: a proxy of an object in the worker."""

    def __init__(self, ask: Callable[..., Any], handle: int):
        object.__setattr__(self, "_remote_ask", ask)
        object.__setattr__(self, "_remote_id", handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the worker."""
        return self._remote_ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # The program does not answer Python's own protocols (copying, iterating, ...).
            raise AttributeError(name)
        return self._remote_ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_ask("getitem", self, key)

    def __iter__(self) -> Any:
        return iter(self._remote_list())

    def __len__(self) -> int:
        return len(self._remote_list())

    def _remote_list(self) -> list[Any]:
        items = self._remote_ask("list", self)
        if type(items) is not list:
            raise TypeError("an object of the program did not give a list")
        return items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._remote_id == self._remote_id

    def __hash__(self) -> int:
        return hash(self._remote_id)


def _send(stream: BinaryIO, message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _read_line(reader: BinaryIO) -> bytes:
    """Read a line; messages alternate, so nothing follows it in the pipe."""
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
        *([(resource.RLIMIT_MSGQUEUE, 0)] if hasattr(resource, "RLIMIT_MSGQUEUE") else []),
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
                # Handle k is the k-th required name, so the answer need not list them.
                objects.extend(namespace.get(name) for name in arguments[1])
                value: Any = [name for name in arguments[1] if name not in namespace]
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
    namespace: dict[str, Any] = {"__name__": "__tests__", "__builtins__": builtins}
    exec(compile(job["setup"], "<setup>", "exec"), namespace)
    tests = compile(job["tests"], "<tests>", "exec")

    def answer(operation: str, arguments: tuple[Any, ...]) -> Any:
        _send(writer, {"op": operation, "args": [encode(a) for a in arguments]})
        reply = parse(_read_line(reader))
        if not isinstance(reply, dict) or len(reply) != 1:
            raise Malformed("not one value or error")
        if "value" in reply:
            return decode(reply["value"], lambda number: Remote(ask, number))
        error = reply.get("error")
        if not (isinstance(error, list) and [type(part) for part in error] == [str, str]):
            raise Malformed("an error without name and text")
        return error_of(*error)

    def ask(operation: str, *arguments: Any) -> Any:
        try:
            answered = answer(operation, arguments)
        except Malformed as error:
            # Not raised: the tests might catch it and go on.
            _send(writer, {"failed": ["the program forged an answer", str(error)]})
            os._exit(0)
        if isinstance(answered, Exception):
            raise answered
        return answered

    entry = job["entry"]
    missing = ask("load", job["code"], entry)
    if missing != []:
        first = missing[0] if type(missing) is list and missing[0] in entry else "what it should"
        raise NameError(f"the program does not define {first}")
    for handle, name in enumerate(entry):
        namespace[name] = Remote(ask, handle)
    exec(tests, namespace)


def error_of(name: str, text: str) -> Exception:
    """Return the built-in exception ``name``, or a RuntimeError where the tests must not see it."""
    kind = getattr(builtins, name, None)
    usable = isinstance(kind, type) and issubclass(kind, Exception)
    if not usable or issubclass(cast(type[Exception], kind), _NOT_RAISED):
        return RuntimeError(f"{name}: {text}")
    try:
        return cast(type[Exception], kind)(text)
    except TypeError:  # UnicodeDecodeError and the like take more than a text
        return RuntimeError(f"{name}: {text}")


def main() -> None:
    """Start the role named on the command line."""
    limits = json.loads(sys.argv[2])
    {"worker": worker, "checker": checker}[sys.argv[1]](limits)
