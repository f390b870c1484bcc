"""Keep working when the reader of an output pipe has gone, as in ``train | head -1``."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_NOTE = "{name} was closed by its reader; the command continues without it\n"


class _Pipe:
    """A stream that becomes ``/dev/null`` once its reader has gone."""

    def __init__(self, stream: TextIO, name: str, other: TextIO):
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        with suppress(OSError, ValueError):  # the other stream may have the same reader
            self._other.write(_NOTE.format(name=self._name))
            self._other.flush()


def _can_break(stream: TextIO) -> bool:
    """Return whether the stream's reader can go away: a pipe or socket, not a file or terminal."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


@contextmanager
def closed_pipes_ignored() -> Iterator[None]:
    """Continue when standard output or standard error is a pipe that nobody reads."""
    out, err = sys.stdout, sys.stderr
    if out is None or err is None or not (_can_break(out) or _can_break(err)):
        yield
        return
    sys.stdout, sys.stderr = (  # type: ignore[assignment]
        _Pipe(out, "standard output", err),
        _Pipe(err, "standard error", out),
    )
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        sys.stdout, sys.stderr = out, err
