"""Lines and columns of files that others wrote: none so long, or so named, that it does harm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moe_finetune.errors import DataError

MAX_LINE = 32 << 20


def short_lines(stream: Iterable[str], file: Path) -> Iterator[str]:
    """The lines of an open file (or of a list); a few kilobytes of gzip can hold one of gigabytes.

    Raises:
        DataError: a line has more than ``MAX_LINE`` characters.
    """
    read = getattr(stream, "readline", None)
    lines = iter(stream) if read is None else iter(lambda: read(MAX_LINE + 1), "")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise DataError(
                f"{file}:{number}: the line has more than {MAX_LINE >> 20} Mi characters; split it "
                "into rows of one line each"
            )
        yield line


def refuse_twice(file: Path, columns: Sequence[str]) -> None:
    """Raise DataError when a table's header has a column twice: the last would win in silence."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{file}:1: the column '{twice[0]}' is there twice; rename one of them")
