"""A sandboxed process, and messages to and from it, each with a deadline."""

import contextlib
import os
import selectors
import signal
import time

from moe_finetune.evaluation.sandbox.policy import Limits, start


class Stopped(Exception):
    """The program or its tests cannot continue; the text is the verdict's reason."""


class SandboxProcess:
    """One sandboxed process with line messages over its stdin and stdout."""

    def __init__(self, kind: str, role: str, limits: Limits):
        self.process = start(kind, role, limits)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._buffer = bytearray()
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
                raise Stopped("the program ended early") from None

    def receive(self, deadline: float) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > self._cap:
                raise Stopped("an answer was too large")
            self._wait(self._out, selectors.EVENT_READ, deadline)
            if not self._read():
                raise Stopped("the program ended early")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def silent(self) -> bool:
        """Return whether everything that the process wrote has been received."""
        with selectors.PollSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            return not self._buffer and not (selector.select(0) and self._read())

    def _read(self) -> bool:
        try:
            piece = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return True
        self._buffer += piece
        return bool(piece)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        # The clock first: a process that always has a byte ready must still end.
        remaining = deadline - time.monotonic()
        with selectors.PollSelector() as selector:
            selector.register(fd, event)
            if remaining <= 0 or not selector.select(remaining):
                raise Stopped("out of time")

    def kill(self) -> None:
        """Kill the whole sandbox and wait until its pipe is closed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 5
        with contextlib.suppress(Stopped, OSError):
            while True:
                self._wait(self._out, selectors.EVENT_READ, deadline)
                if not os.read(self._out, 1 << 16):
                    break
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
