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
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200
_SEQUENCES: dict[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in _SEQUENCES.items()}
_DICTIONARIES = (dict, Counter, OrderedDict, defaultdict)
# Raised in the tests, these would end a loop there.
_NOT_RAISED = ("StopIteration", "StopAsyncIteration")


class Malformed(Exception):
    """The program wrote an answer, not the runner."""


def encode(value, keep=None, depth=0):
    """Plain data as tagged JSON; anything else as a handle made by ``keep``."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    kind = type(value)  # exact types: a subclass may override their behavior
    if value is None or kind in (bool, str):
        return value
    if kind is Remote:
        return {"o": hex(value._remote_id)}
    if kind is int:
        return {"i": hex(value)}
    if kind is float:
        return {"f": value.hex()}
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {"b": value.hex()}
    if kind in _TAGS:
        return {_TAGS[kind]: [encode(v, keep, depth + 1) for v in value]}
    if kind in _DICTIONARIES:
        return {"d": [[encode(x, keep, depth + 1) for x in item] for item in value.items()]}
    if keep is None:
        raise TypeError(f"a {kind.__name__} cannot be passed to generated code")
    return {"o": hex(keep(value))}


def decode(value, resolve):
    """Undo :func:`encode`; raises Malformed for anything that it does not write."""
    try:
        return _decode(value, resolve, 0)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Malformed(str(error)[:100]) from None


def _decode(value, resolve, depth):
    if value is None or isinstance(value, (bool, str)):
        return value
    if depth > MAX_DEPTH or not isinstance(value, dict) or len(value) != 1:
        raise Malformed("neither a text nor a tagged value")
    ((tag, content),) = value.items()
    inner = lambda item: _decode(item, resolve, depth + 1)  # noqa: E731
    if tag in _SEQUENCES and isinstance(content, list):
        return _SEQUENCES[tag](map(inner, content))
    if tag == "d" and isinstance(content, list):
        return {inner(key): inner(item) for key, item in content}
    if tag == "c":
        return complex(*map(float.fromhex, content))
    readers = {
        "i": lambda t: int(t, 16),
        "f": float.fromhex,
        "b": bytes.fromhex,
        "o": lambda t: resolve(int(t, 16)),
    }
    if tag not in readers or not isinstance(content, str):
        raise Malformed("an unknown tag")
    return readers[tag](content)


class Remote:
    """In the checker: a proxy of an object in the worker."""

    def __init__(self, ask, handle):
        object.__setattr__(self, "_remote_ask", ask)
        object.__setattr__(self, "_remote_id", handle)

    def __call__(self, *args, **kwargs):
        return self._remote_ask("call", self, list(args), kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote_ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._remote_ask("setattr", self, name, value)

    def __getitem__(self, key):
        return self._remote_ask("getitem", self, key)

    def __iter__(self):
        items = self._remote_ask("list", self)
        if type(items) is not list:
            raise TypeError("an object of the program did not give a list")
        return iter(items)

    def __len__(self):
        return sum(1 for _ in iter(self))

    def __eq__(self, other):
        return isinstance(other, Remote) and other._remote_id == self._remote_id

    def __hash__(self):
        return hash(self._remote_id)


def worker(reader, send):
    """Execute the first message's code, then answer operations on what it defined."""
    objects, namespace = [], {"__name__": "__program__"}

    def keep(value):
        objects.append(value)
        return len(objects) - 1

    def load(code, names):
        exec(compile(code, "<program>", "exec"), namespace)
        objects.extend(namespace.get(name) for name in names)  # handle k is the k-th name
        return [name for name in names if name not in namespace]

    operations: dict[str, Callable[..., Any]] = {
        "load": load,
        "call": lambda f, args, kwargs: f(*args, **kwargs),
        "list": list,
        "getitem": lambda o, key: o[key],
        "getattr": getattr,
        "setattr": setattr,
    }
    for line in reader:
        try:
            message = json.loads(line)
            arguments = [decode(a, objects.__getitem__) for a in message["args"]]
            reply = {"value": encode(operations[message["op"]](*arguments), keep)}
        except BaseException as error:  # SystemExit is a failure here
            reply = {"error": _describe(error)}
        send(reply)


def checker(reader, send):
    """Run the tests, and print the nonce after the last one."""
    job = json.loads(reader.readline())

    def ask(operation, *arguments):
        send({"op": operation, "args": [encode(a) for a in arguments]})
        try:
            return answer(reader.readline())
        except Malformed as error:  # not raised: the tests might catch it and go on
            send({"failed": f"the program forged an answer: {error}"})
            os._exit(0)

    def answer(line):
        try:
            text = line.decode("ascii")
            reply = json.loads(text, parse_int=_refuse, parse_float=_refuse, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise Malformed(str(error)[:100]) from None
        if not isinstance(reply, dict) or len(reply) != 1:
            raise Malformed("not one value or error")
        if "value" in reply:
            return decode(reply["value"], lambda number: Remote(ask, number))
        raised = reply.get("error")
        if not (isinstance(raised, list) and [type(part) for part in raised] == [str, str]):
            raise Malformed("an error without name and text")
        raise _error_of(*raised)

    namespace = {"__name__": "__tests__"}
    try:
        exec(job["setup"], namespace)
        missing = ask("load", job["code"], job["entry"])
        if missing != []:
            raise NameError(f"the program does not define {missing[0]}")
        namespace |= {name: Remote(ask, k) for k, name in enumerate(job["entry"])}
        exec(job["tests"], namespace)
    except BaseException as error:
        send({"failed": ": ".join(filter(None, _describe(error)))})
    else:
        send({"done": job["nonce"]})


def _refuse(text):
    raise Malformed(f"a bare number ({text[:20]})")


def _error_of(name, text):
    """The built-in exception ``name``, or a RuntimeError where the tests must not see it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and name not in _NOT_RAISED:
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and the like take more than a text
            pass
    return RuntimeError(f"{name}: {text}")


def _describe(error):
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return [type(error).__name__[:100], text]


def main():
    """Limit this process, move the channel off fds 0-2, and start the role."""
    role, limits = sys.argv[1], json.loads(sys.argv[2])
    if uid := limits.pop("uid"):  # limits on processes do not bind root
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def send(message):
        writer.write(json.dumps(message).encode() + b"\n")
        writer.flush()

    {"worker": worker, "checker": checker}[role](reader, send)
