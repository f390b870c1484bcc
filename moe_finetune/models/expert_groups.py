"""How many experts a model of a family needs, in all and in each group of a layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_finetune.models.family import Family


@dataclass(frozen=True)
class ExpertGroups:
    """A layer's experts lie in ``groups`` of one size; a token selects ``top_k`` from ``allowed``.

    ``summed``: how many experts' scores make up a group's: DeepSeek-V3's sums two.
    """

    groups: int
    allowed: int
    top_k: int
    summed: int

    @classmethod
    def of(cls, family: Family, config: Any) -> ExpertGroups:
        """Those of a config, the language part's of a composite."""
        return cls.made(*family.groups(config), family.top_k(config), family.score)

    @classmethod
    def made(cls, groups: int, allowed: int, top_k: int, score: str) -> ExpertGroups:
        """Of a family's score function: where it is a softmax, a group's score is its best."""
        summed = 2 if groups > 1 and score != "softmax" else 1
        return cls(groups, allowed, top_k, summed)

    @property
    def least(self) -> int:
        """The fewest experts that each group needs."""
        return max(self.summed, math.ceil(self.top_k / self.allowed))

    def problem(self, experts: Sequence[int], total: int) -> str | None:
        """Why a layer of ``total`` experts does not work with only ``experts``; None if it does."""
        size = total // self.groups
        counts = Counter(expert // size for expert in experts)
        sizes = {counts[group] for group in range(self.groups)}
        where = "" if self.groups == 1 else f" in each of its {self.groups} groups"
        if len(sizes) > 1:
            return (
                f"{min(sizes)} to {max(sizes)} experts{where}, which need equally many; "
                "select with --keep"
            )
        if min(sizes) < self.least:
            return (
                f"{min(sizes)} experts{where}, but a token selects {self.top_k}"
                + (f" from {self.allowed} of the groups" if where else "")
                + f"; keep at least {self.least}{where}"
            )
        return None
