"""How a quantized weight maps to its packed units."""

import math
from dataclasses import dataclass

from moe_finetune.quantization.codec import BLOCK


@dataclass(frozen=True)
class Layout:
    """How the weight maps to the packed matrices.

    Attributes:
        stored: rows and columns of each packed unit.
        stacked: whether units are experts instead of consecutive rows of one matrix.
        transposed: whether the weight is the transpose of the packed matrices.
        rows: start, stop and step of the weight's rows within the (transposed) matrices.
        flat: whether the weight is flattened to one dimension.
    """

    stored: tuple[int, int]
    stacked: bool
    transposed: bool = False
    rows: tuple[int, int, int] | None = None
    flat: bool = False

    def shape(self, units: int) -> tuple[int, ...]:
        rows, columns = self.stored
        if not self.stacked:
            rows *= units
        first, second = (columns, rows) if self.transposed else (rows, columns)
        if self.rows is not None:
            first = len(range(*self.rows))
        if self.flat:
            return (units * math.prod(self.stored),)
        return (units, first, second) if self.stacked else (first, second)

    @property
    def whole(self) -> bool:
        """Whether the weight is all of its units, untransposed and unsliced."""
        return not (self.transposed or self.rows or self.flat)

    @property
    def experts_first(self) -> bool:
        return self.stacked and not self.flat

    @property
    def rows_per_unit(self) -> int:
        """Number of indices of the weight's first dimension per unit."""
        return 1 if self.stacked else self.stored[0]


def unit_rows(rows: int, columns: int) -> int:
    """The fewest rows that fill whole blocks and divide the matrix; all rows if none do."""
    unit = BLOCK // math.gcd(BLOCK, columns)
    return unit if rows % unit == 0 else rows
