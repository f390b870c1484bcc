"""Rows held out for validation: ``data.validation: 0.1``, by a hash of what is read of a row.

A row whose hash falls into the share is validation data. So equal rows are on one side, a row keeps
its side when others are added, and no list of rows is stored.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.io.counted import counted
from moe_finetune.io.row_files import Row

log = logging.getLogger(__name__)
FEW = 20
"""Rows held out below which a warning says how rough their figures are."""
_NUMBERS = 1 << 64


@dataclass(frozen=True)
class HeldOut:
    """The split of rows into training and validation.

    Attributes:
        share: of the rows that are held out, between 0 and 1.
        seed: another one holds out other rows.
        fields: that decide a row's side; None for all.
    """

    share: float
    seed: int
    fields: Collection[str] | None = None

    def number(self, row: Row) -> int:
        """The first 64 bits of SHA-256 of the row's fields and the seed."""
        read = {k: v for k, v in row.items() if self.fields is None or k in self.fields}
        text = json.dumps([self.seed, read], sort_keys=True, default=str)
        return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8])

    def boundary(self, rows: Iterable[Row]) -> int:
        """The largest number of a row that is held out.

        If no row of a small file falls into the share, that with the smallest number is held out;
        only this row changes sides when the file grows. At least one row stays in training.
        """
        boundary = int(self.share * _NUMBERS)
        smallest, largest = _NUMBERS, -1
        for row in rows:
            number = self.number(row)
            smallest, largest = min(smallest, number), max(largest, number)
        if smallest >= largest:
            raise DataError(
                f"data.validation: {self.share}: holds out rows of data.train, which has no two "
                "different rows; give more rows, or files of validation data"
            )
        return min(max(boundary, smallest), largest - 1)


def held_out_of(data: Any, seed: int, fields: Collection[str] | None = None) -> HeldOut | None:
    """The split of a recipe's ``data`` section; None where files are validation data."""
    return HeldOut(data.validation, seed, fields) if isinstance(data.validation, float) else None


def warn_of_few(data: Any, trained: int, held: int) -> None:
    """Warn if a share holds out so few rows that figures measured on them are rough."""
    if isinstance(data.validation, float) and held < FEW:
        log.warning(
            "data.validation: %g holds out only %s of %s, so figures measured on them are rough; "
            "give more rows, a larger share, or files of validation data",
            data.validation,
            f"{held:,}",
            counted(held + trained, "row"),
        )
