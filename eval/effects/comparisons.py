"""The comparisons in the rows of the table of effects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eval.effects.readings import Reading, Result
from eval.effects.shards import Part

BALANCE = "aux_loss"
"""The run with only a balance loss; a study may name another for methods that balance otherwise."""


@dataclass(frozen=True)
class Comparison:
    """One row of the table.

    Attributes:
        what: the quantity.
        reading: function from a run's result to the number; None if the run has no such number.
        part, arm: the runs.
        baseline: arm that is subtracted, seed by seed; None compares with ``reference``.
        sign: +1 or -1, the claimed sign of the difference; 0: no change within ``margin``.
        margin: bound for sign 0, as a share of the baseline's mean.
        reference: number to subtract if there is no baseline arm.
        at_most: the claim is met only if the arm's mean is at most this share of the baseline's.
        pair: a reading of both runs together, instead of the difference.
    """

    what: str
    reading: Reading
    part: Part
    arm: str
    baseline: str | None
    sign: Literal[-1, 0, 1]
    margin: float = 0.1
    reference: float = 0.0
    at_most: float | None = None
    pair: Callable[[Result, Result], float] | None = None


@dataclass(frozen=True)
class Effect:
    """One headline effect: the paper's result, and the comparisons that test it."""

    number: int
    name: str
    paper: str
    comparisons: Sequence[Comparison]


def tuned(
    what: str,
    reading: Reading,
    arm: str,
    sign: Literal[-1, 0, 1],
    baseline: str = BALANCE,
    **more: Any,
) -> Comparison:
    """A row of the fine-tuned arms, against the balance loss unless another baseline is named."""
    return Comparison(what, reading, "finetune", arm, baseline, sign, **more)


def scratch(
    what: str, reading: Reading, arm: str, sign: Literal[-1, 0, 1], **more: Any
) -> Comparison:
    """A row of the arms from scratch, against the balance loss."""
    return Comparison(what, reading, "scratch", arm, BALANCE, sign, **more)
