"""The texts of each category, read from their sources when needed.

Equal texts count once: a repeat within a category or from an earlier category is dropped. Otherwise
the same text could be trained on in one category and tested in another, and the clusters would
overlap (P3 §3.1 requires disjoint ones).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moe_finetune.errors import DataError

if TYPE_CHECKING:
    from moe_finetune.upcycle.schema import TextSection

LEAST_TEXTS = 3


@dataclass(frozen=True)
class Category:
    """The distinct texts of a category: ``used_R`` marks those of the sources' R rows that are its
    texts, ``repeated`` counts repetitions, ``digest`` is the SHA-256 of the texts.
    """

    read: Callable[[], Iterable[str]]
    used_R: np.ndarray
    repeated: int
    digest: str

    def __len__(self) -> int:
        return int(self.used_R.sum())

    def __iter__(self) -> Iterator[str]:
        return (text for text, used in zip(self.read(), self.used_R, strict=True) if used)


def read_categories(section: TextSection) -> dict[str, Category]:
    """Find every category's distinct texts; only their hashes stay in memory."""
    readers = {name: partial(_rows, name, paths) for name, paths in section.categories.items()}
    seen: set[bytes] = set()
    categories = {}
    for name, read in readers.items():
        is_new: list[bool] = []
        digest = hashlib.sha256()
        different = 0
        for text in read():
            # 64 bits: among ten million distinct texts, a collision has probability 3e-6.
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            is_new.append(key not in seen)
            seen.add(key)
            different += is_new[-1]
            if is_new[-1] and (section.limit is None or different <= section.limit):
                digest.update(key)
        repeated = len(is_new) - different
        if different < LEAST_TEXTS:
            raise DataError(
                f"texts.categories.{name}: {different} different texts ({repeated} of "
                f"{len(is_new)} rows repeat others, of this category or an earlier one); it "
                f"needs at least {LEAST_TEXTS} (train, validation and test); add texts or leave "
                "the category out"
            )
        used_R = np.array(is_new)
        if section.limit is not None:
            used_R &= np.cumsum(used_R) <= section.limit
        categories[name] = Category(read, used_R, repeated, digest.hexdigest())
    return categories


def remark_on_repetitions(categories: Mapping[str, Category]) -> str | None:
    """A sentence on repeated rows, which are dropped; None without any."""
    counts = [
        f"{name} {category.repeated} of {len(category.used_R)}"
        for name, category in categories.items()
        if category.repeated
    ]
    if not counts:
        return None
    return (
        "rows that repeat another of their category or of an earlier one are dropped: "
        + ", ".join(counts)
    )


def _rows(category: str, paths: str | list[str]) -> Iterator[str]:
    from moe_finetune.data.row_forms import Former
    from moe_finetune.data.sources import read_rows

    for source in [paths] if isinstance(paths, str) else paths:
        try:
            former = Former("text")
            yield from (former(row_place, row)["text"] for row_place, row in read_rows(source))
        except DataError as error:
            raise DataError(f"texts.categories.{category}: {error}") from error
