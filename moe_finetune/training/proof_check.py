"""One comparison of a declared family with the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        difference: the largest, relative to the largest value; None for names and numbers.
        bound: what the difference may be.
        problem: the fact that is wrong, and what the model says; None where all is right.
        note: what else a reader should know.
    """

    name: str
    difference: float | None = None
    bound: float | None = None
    problem: str | None = None
    note: str = ""

    def line(self) -> str:
        if self.problem is not None:
            return f"WRONG  {self.name}: {self.problem}"
        within = (
            "" if self.difference is None else f"{self.difference:.1e} (bound {self.bound:.0e})"
        )
        return f"ok     {self.name:<24} {within or 'as declared'}{self.note and '; ' + self.note}"
