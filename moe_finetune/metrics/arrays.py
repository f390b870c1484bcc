"""Input arrays of metrics, torch or numpy: checks and conversion.

N are items of a sample, R ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe_finetune.errors import NumericsError

Array = Any
"""A numpy array, a torch tensor on any device, or nested lists."""


class NotFiniteError(NumericsError, ValueError):
    """NaN or infinity in the array ``name`` of a metric."""

    def __init__(self, name: str, problem: str):
        super().__init__(f"{name}: {problem}")
        self.name = name


def to_numpy(values: Array) -> np.ndarray:
    """``values`` as a numpy array; torch tensors are detached, bfloat16 becomes float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":
            values = values.float()
        return values.numpy()
    return np.asarray(values)


def mean_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if all are."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def check_shape(name: str, array: np.ndarray, expected: Sequence[int | str]) -> None:
    """Raise ValueError unless ``array`` has the shape ``expected`` (letters match any size)."""
    fits = array.ndim == len(expected) and all(
        isinstance(size, str) or size == actual
        for size, actual in zip(expected, array.shape, strict=True)
    )
    if not fits:
        shape = ", ".join(str(size) for size in expected)
        raise ValueError(f"{name}: got shape {tuple(array.shape)}, expected ({shape})")


def _filled(name: str, values: Array, expected: Sequence[int | str]) -> np.ndarray:
    array = to_numpy(values)
    check_shape(name, array, expected)
    if array.size == 0:
        shape = ", ".join(str(size) for size in expected)
        raise ValueError(
            f"{name}: got the empty shape {tuple(array.shape)}, expected ({shape}) > 0"
        )
    return array


def floats(
    name: str, values: Array, expected: Sequence[int | str], as_given: bool = False
) -> np.ndarray:
    """Finite, non-empty array of the shape ``expected``, in float64.

    ``as_given`` keeps the dtype, for arrays that are converted chunk by chunk.
    """
    array = _filled(name, values, expected)
    if not as_given:
        array = array.astype(np.float64, copy=False)
    if not np.isfinite(array).all():
        bad = np.argwhere(~np.isfinite(array))
        raise NotFiniteError(
            name,
            f"{len(bad)} of {array.size} values are NaN or infinite, the first at "
            f"{tuple(bad[0].tolist())}; remove those rows, or find their cause",
        )
    return array


def integers(
    name: str, values: Array, expected: Sequence[int | str], limit: int | None = None
) -> np.ndarray:
    """Non-empty integer array of the shape ``expected``, all in ``[0, limit)`` if given."""
    array = _filled(name, values, expected)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: got dtype {array.dtype}, expected integers")
    if limit is not None:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{name}: got values from {low} to {high}, expected 0 to {limit - 1}")
    return array


def keep(name: str, mask_T: Array | None, tokens: int) -> np.ndarray | slice:
    """Index of the tokens that count, all without a mask; ValueError if none do."""
    if mask_T is None:
        return slice(None)
    mask = to_numpy(mask_T)
    check_shape(name, mask, (tokens,))
    mask = mask.astype(bool)
    if not mask.any():
        raise ValueError(f"{name}: all False, expected at least one True of {tokens}")
    return mask


def chunks(rows: int, row_elements: int, limit: int = 4_000_000) -> Iterator[slice]:
    """Slices over ``rows`` of at most about ``limit`` elements each."""
    step = max(1, limit // max(1, row_elements))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """``-sum p ln p`` over the last axis in nats, with 0 ln 0 = 0."""
    logs = np.log(np.maximum(probabilities, np.finfo(probabilities.dtype).tiny))
    logs *= probabilities
    return 0.0 - logs.sum(-1)


def unit_rows(array: np.ndarray) -> np.ndarray:
    """Rows divided by their Euclidean norm; a zero row stays zero (cosine 0 with anything)."""
    # Scaling by the largest entry first keeps tiny and huge rows from under- and overflowing.
    largest = np.abs(array).max(-1, keepdims=True)
    scaled = np.divide(array, largest, out=np.zeros_like(array), where=largest > 0)
    norms = np.linalg.norm(scaled, axis=-1, keepdims=True)
    return np.divide(scaled, norms, out=np.zeros_like(scaled), where=norms > 0)
