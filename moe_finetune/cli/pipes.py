"""Keep working when the reader of an output pipe has gone, as in ``train | head -1``."""

import io
import os
import stat
import sys
from typing import Any


class Pipe(io.FileIO):
    """Standard output or error that becomes ``/dev/null`` once its reader has gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """Make standard output and error go on without a reader, where they are pipes."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if (
            stream
            and stream is sys.__dict__[f"__{name}__"]
            and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        ):
            raw = io.BufferedWriter(Pipe(descriptor, "w", closefd=False))
            options = {"encoding": stream.encoding, "errors": stream.errors}
            buffered = io.TextIOWrapper(raw, **options, line_buffering=stream.line_buffering)
            setattr(sys, name, buffered)
