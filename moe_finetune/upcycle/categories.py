"""The texts of each category, read from their sources whenever they are needed.

Equal texts count once: a repeat within a category is dropped, and so is a text that an earlier
category has. The same text in two categories could be trained on in one and tested in the other,
and the clusters would overlap (P3 §3.1 wants disjoint ones).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moe_finetune.errors import DataError

if TYPE_CHECKING:
    from moe_finetune.upcycle.sections import TextSection

LEAST_TEXTS = 3


@dataclass(frozen=True)
class Category:
    """A category's different texts in their sources' order; iterating reads the sources again.

    Attributes:
        read: yields every row of the sources.
        used_R: bool, the rows that are texts of this category; R rows.
        repeated: rows that repeat an earlier one of the category.
        elsewhere: rows that an earlier category has.
        digest: SHA-256 of the texts.
    """

    read: Callable[[], Iterable[str]]
    used_R: np.ndarray
    repeated: int
    elsewhere: int
    digest: str

    def __len__(self) -> int:
        return int(self.used_R.sum())

    def __iter__(self) -> Iterator[str]:
        return (text for text, used in zip(self.read(), self.used_R, strict=True) if used)


def read_categories(section: TextSection) -> dict[str, Category]:
    """Find every category's different texts; a row costs eight bytes of memory, its hash.

    Raises:
        DataError: a source that cannot be read, or a category with fewer than three texts.
    """
    readers: dict[str, Callable[[], Iterable[str]]]
    if section.corpus == "python":
        from moe_finetune.upcycle.corpus import read_corpus

        # Small, and made of pieces of files: the only texts that stay in memory.
        readers = {name: partial(iter, texts) for name, texts in read_corpus().items()}
    else:
        sources = section.categories or {}
        readers = {name: partial(_rows, name, paths) for name, paths in sources.items()}
    hashes = {name: _hashes(read()) for name, read in readers.items()}
    all_A = np.concatenate(list(hashes.values()))
    _, first_A, which_A = np.unique(all_A, return_index=True, return_inverse=True)
    earliest_A = first_A[which_A]
    categories = {}
    start = 0
    for name, hashes_R in hashes.items():
        rows = len(hashes_R)
        earliest_R = earliest_A[start : start + rows]
        used_R = earliest_R == np.arange(start, start + rows)
        elsewhere, different = int((earliest_R < start).sum()), int(used_R.sum())
        repeated = rows - elsewhere - different
        if different < LEAST_TEXTS:
            dropped = [f"{repeated} of {rows} rows repeat others"] if repeated else []
            dropped += [f"{elsewhere} of {rows} are in earlier categories"] if elsewhere else []
            raise DataError(
                f"texts.categories.{name}: {different} different texts"
                + (f" ({', '.join(dropped)})" if dropped else "")
                + f", expected at least {LEAST_TEXTS} (train, validation and test); add texts or "
                "leave the category out"
            )
        if section.limit is not None:
            used_R &= np.cumsum(used_R) <= section.limit
        digest = hashlib.sha256(hashes_R[used_R].tobytes()).hexdigest()
        categories[name] = Category(readers[name], used_R, repeated, elsewhere, digest)
        start += rows
    return categories


def remark_on_repetitions(categories: Mapping[str, Category]) -> str | None:
    """Say how many repeated rows are dropped; None if there are none."""
    inside = _counts(categories, "repeated")
    across = _counts(categories, "elsewhere")
    lines = [f"rows that repeat another of their category are dropped: {inside}"] if inside else []
    if across:
        lines.append(f"rows that are in an earlier category too are dropped: {across}")
    return "; ".join(lines) or None


def _counts(categories: Mapping[str, Category], kind: str) -> str:
    return ", ".join(
        f"{name} {count} of {len(category.used_R)}"
        for name, category in categories.items()
        if (count := getattr(category, kind))
    )


def _rows(category: str, paths: str | list[str]) -> Iterator[str]:
    from moe_finetune.data.rows import Former
    from moe_finetune.data.sources import read_rows

    for source in [paths] if isinstance(paths, str) else paths:
        try:
            former = Former("text")
            yield from (former(row_place, row)["text"] for row_place, row in read_rows(source))
        except DataError as error:
            raise DataError(f"texts.categories.{category}: {error}") from error


def _hashes(texts: Iterable[str]) -> np.ndarray:
    """64 bits of each text; two of ten million different texts meet with a chance of 3e-6."""
    values = array("Q")
    for text in texts:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        values.append(int.from_bytes(digest, "little"))
    return np.frombuffer(values, "<u8") if values else np.zeros(0, "<u8")
