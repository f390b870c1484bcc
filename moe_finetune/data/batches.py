"""Rows of different length in one batch, padded on the right.

Shape legend: B rows, S positions of the longest row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Row = TypeVar("Row")


def fill(rows: Iterable[Row], positions: int, length: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Yield batches of consecutive rows with at most ``positions`` padded tokens, or a single row.

    Rows that are sorted by length need the least padding.
    """
    batch: list[Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, length(row))
        if batch and (len(batch) + 1) * longest > positions:
            yield batch
            batch, longest = [], length(row)
        batch.append(row)
    if batch:
        yield batch


def pad(rows: Sequence[Sequence[int] | np.ndarray], value: int = 0) -> Tensor:
    """``(B, S)`` int64: each row, padded with ``value``."""
    tensors = [torch.as_tensor(np.asarray(row, np.int64)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def mask(rows: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    """``(B, S)`` int64: 1 at each row's tokens, 0 at the padding."""
    return pad([np.ones(len(row), np.int64) for row in rows])
