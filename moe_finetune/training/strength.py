"""How strong each loss term is on this model and data: its gradient against the language loss's.

Definition. Over one window (the micro-batches of an optimizer step), a term's *share* is the norm
of its weighted gradient over the norm of the gradient of the trainer's own loss, on the same
parameters: those of the routers, or of the routed experts, that train. Weighted means the full
weight, before any schedule. A term that trains both parts has two shares; the larger one counts.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LARGEST_WEIGHT, Term
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.hooks import Recorder
from moe_finetune.training import ranks
from moe_finetune.training.replay import Gradients, Replay, product

PARTS = ("router", "experts")
WHISPER, AIM, DROWNS = 0.01, 0.1, 1.0
"""Shares: below the first nothing shows; above the last the language loss is drowned."""
FIRST_WINDOWS = 50
"""Windows that may go by before a share's first weight is found."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TermStrength:
    """One term's gradient on one window, at weight 1, against the language loss's.

    Attributes:
        trains: the parts its own layer's gradient reaches.
        weight: its full weight; 0 for a share whose weight is not found.
        shares, cosines: by part; None where nothing trains, or the language loss has no gradient.
    """

    term: str
    trains: frozenset[str]
    weight: float
    shares: Mapping[str, float | None]
    cosines: Mapping[str, float | None]

    @property
    def at_one(self) -> float:
        """The share at weight 1: the larger of the parts it trains, else of those it reaches."""
        known = {part: share for part, share in self.shares.items() if share is not None}
        mainly = [share for part, share in known.items() if part in self.trains]
        return max(mainly or known.values(), default=0.0)

    @property
    def share(self) -> float:
        """The share at its weight."""
        return self.weight * self.at_one

    def weight_for(self, share: float) -> float | None:
        """The weight that gives this share; None where a gradient is missing or vanishes."""
        weight = share / self.at_one if self.at_one > 0 else math.inf
        return weight if weight <= LARGEST_WEIGHT else None

    @property
    def missing(self) -> str:
        """Why no weight gives it a share."""
        if all(share is None for share in self.shares.values()):
            return "the trainer's own loss has no gradient where the term acts"
        if self.at_one > 0:
            return f"the weight would be more than {LARGEST_WEIGHT:g}"
        return "the term has no gradient (its aim is met)"

    def row(self) -> dict[str, Any]:
        """What :func:`measure_strength` returns."""
        shares = {k: None if v is None else v * self.weight for k, v in self.shares.items()}
        return {
            "term": self.term,
            "weight": self.weight,
            **{f"share_{part}": shares[part] for part in PARTS},
            **{f"cosine_{part}": self.cosines[part] for part in PARTS},
            "weight_for_10_percent": self.weight_for(AIM),
        }


class StrengthMeter:
    """Measures an installed recorder's objective on the windows that are due.

    Due are the first window, every ``every``-th after it, and those of terms whose share says so. A
    window is measured right before its optimizer step; a weight found there acts from the next step
    on, so that the step that is measured has no share's term in it unless one was found before.
    Where a window gives no weight, since the term or the trainer's loss has no gradient in it, the
    term keeps the weight that it has; without one, the next window is due, up to ``tries`` of them.

    Args:
        recorder: whose objective is measured.
        objective: the recorder's.
        every: steps between measurements; None measures the first window alone.
        first: whether the first window is measured where no share needs it.

    Attributes:
        rows: of the last measurement.
        tries: windows after which a share without a weight is an error.
        on_measured: called with the step and the rows, on every rank.
    """

    def __init__(
        self,
        recorder: Recorder,
        objective: Objective,
        every: int | None = None,
        first: bool = True,
    ):
        self.objective = objective
        self.every = every
        self.first = first
        self.rows: list[TermStrength] = []
        self.on_measured: list[Callable[[int, list[TermStrength]], None]] = []
        self._replay = Replay(recorder, objective)
        self._step = 0
        self._due: set[str] = set()
        self.tries = FIRST_WINDOWS
        self._misses: dict[str, int] = {}
        self._hook: Any = None

    def begin(self, step: int) -> None:
        """Get ready to measure the window of optimizer step ``step`` (0-based), if it is due.

        Raises:
            ObjectiveError: a share's weight is to be found where gradients cannot be read.
        """
        self.close()
        self._step = step
        self._due = {term.name for term in self.objective.terms if self._finds(term)}
        wanted = (step == 0 and self.first) or (self.every is not None and step % self.every == 0)
        if not self.objective.terms or not (wanted or self._due):
            return
        obstacle = _obstacle(self._replay.recorder.model)
        if obstacle is None and self._due and not self._replay.parts():
            obstacle = "neither routers nor routed experts train, and gradients are compared there"
        if obstacle is not None:
            self._give_up(obstacle)
            return
        self._replay.note()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _finds(self, term: Term) -> bool:
        options = term.options
        if options.share is None:
            return False
        again = options.every is not None and self._step % options.every == 0
        return again or self.objective.full_weights[term.name] is None

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._replay.forget()

    def finish(self) -> None:
        """After the last step: report the shares that never had a weight."""
        self.close()
        for name in sorted(self._misses):
            log.warning(
                "method.terms.%s.share: no window gave it a weight; the term had no effect", name
            )

    def end(self) -> None:
        """After an optimizer step: report a window that was due and could not be measured.

        Raises:
            ObjectiveError: the weight of a share was to be found.
        """
        if self._hook is None:
            return
        forwards = self._replay.count
        self.close()
        if forwards:
            self._give_up("no torch.optim.Optimizer took a step over these parameters")
        else:
            self._miss("no gradient came back through the model")

    def _give_up(self, reason: str) -> None:
        """The window cannot be measured, and no later one can."""
        missing = sorted(name for name in self._due if self.objective.full_weights[name] is None)
        if missing:
            raise ObjectiveError(
                f"method.terms.{missing[0]}.share: its weight cannot be found: {reason}; give "
                "a weight instead"
            )
        log.warning("the losses' strength is not measured: %s", reason)

    def _miss(self, reason: str) -> None:
        """This window gives none of the due terms a weight."""
        for name in sorted(self._due):
            self._miss_one(name, reason)

    def _miss_one(self, name: str, reason: str) -> None:
        weight, key = self.objective.full_weights[name], f"method.terms.{name}.share"
        where = f"step {self._step + 1}: {key}"
        if weight is not None:
            log.warning("%s: %s in this window; its weight stays %.3g", where, reason, weight)
            return
        self._misses[name] = self._misses.get(name, 0) + 1
        if self._misses[name] >= self.tries:
            share = next(t.options.share for t in self.objective.terms if t.name == name)
            windows = "the window" if self.tries == 1 else f"the first {self.tries} windows"
            raise ObjectiveError(
                f"{key}: no weight gives it a share of {share:g} in {windows}: {reason}; give a "
                "weight instead, or remove the term"
            )
        if self._misses[name] == 1:
            log.warning(
                "%s: %s in this window; the term has no effect until a window gives it a weight "
                "(up to %d are measured)",
                where,
                reason,
                self.tries,
            )

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        own = {id(parameter) for parameter in self._replay.parameters()}
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if self._replay.count and any(id(parameter) in own for parameter in stepped):
            self.measure()

    def measure(self) -> list[TermStrength]:
        """Measure the forwards noted so far and set the weights that are due; on every rank.

        A window whose gradients are not finite is left out.

        Raises:
            ObjectiveError: a share has no weight after so many windows without a gradient.
        """
        if not ranks.equal_on_ranks(self._replay.count):
            self.close()
            self._give_up("the ranks ran different numbers of forwards")
            return []
        with self._replay.running():
            terms = {term.name: term for term in self.objective.terms}
            rows = [
                _compare(terms[name], self.objective, own, language)
                for name, own, language in self._replay.measured([*terms])
            ]
        self.close()
        rows = _same_on_ranks(rows)
        if not all(_finite(row) for row in rows):
            log.warning(
                "step %d: a gradient is not finite; its strength is not measured", self._step + 1
            )
            self._miss("a gradient is not finite")
            return []
        self.rows = [self._with_found(row) for row in rows]
        if ranks.rank() == 0:
            for row in self.rows:
                if row.weight or row.term not in self._due:
                    _say(row)
        for call in self.on_measured:
            call(self._step, self.rows)
        return self.rows

    def _with_found(self, row: TermStrength) -> TermStrength:
        """The row at the weight that is found for its share, where that is due."""
        if row.term not in self._due:
            return row
        wanted = next(t.options.share for t in self.objective.terms if t.name == row.term)
        assert wanted is not None
        weight = row.weight_for(wanted)
        if weight is None:
            self._miss_one(row.term, row.missing)
            return row
        self._misses.pop(row.term, None)
        self.objective.set_full_weight(row.term, weight)
        return TermStrength(row.term, row.trains, weight, row.shares, row.cosines)


def _compare(
    term: Term, objective: Objective, gradients: Gradients, language: Gradients
) -> TermStrength:
    shares: dict[str, float | None] = dict.fromkeys(PARTS)
    cosines: dict[str, float | None] = dict.fromkeys(PARTS)
    for part, own in gradients.items():
        norm, below = (math.sqrt(product(grads, grads)) for grads in (own, language[part]))
        if below == 0:
            continue
        shares[part] = norm / below
        cosines[part] = product(own, language[part]) / (norm * below) if norm else 0.0
    weight = objective.full_weights[term.name] or 0.0
    return TermStrength(term.name, frozenset(term.trains), weight, shares, cosines)


def _same_on_ranks(rows: list[TermStrength]) -> list[TermStrength]:
    """Rank 0's rows, to the last bit."""
    if ranks.world_size() == 1:
        return rows
    values = [[*row.shares.values(), *row.cosines.values()] for row in rows]
    # None is what it is on every rank; the rest goes as numbers.
    numbers = torch.tensor(
        [[0.0 if value is None else value for value in line] for line in values],
        dtype=torch.float64,
        device=ranks.device(),
    )
    distributed.broadcast(numbers, 0)
    same = []
    for row, old, new in zip(rows, values, numbers.tolist(), strict=True):
        kept = [None if o is None else n for o, n in zip(old, new, strict=True)]
        shares = dict(zip(PARTS, kept[: len(PARTS)], strict=True))
        cosines = dict(zip(PARTS, kept[len(PARTS) :], strict=True))
        same.append(TermStrength(row.term, row.trains, row.weight, shares, cosines))
    return same


def _finite(row: TermStrength) -> bool:
    values = (*row.shares.values(), *row.cosines.values())
    return all(value is None or math.isfinite(value) for value in values)


def _say(row: TermStrength) -> None:
    """A line; a warning where the term whispers or drowns the language loss."""
    if all(share is None for share in row.shares.values()):
        log.info("method.terms.%s: not compared, since %s", row.term, row.missing)
        return
    aim = row.weight_for(AIM)
    advice = (
        "no weight changes that while its aim is met"
        if aim is None
        else f"weight {aim:.3g} would be 10 %, and so would share: 0.1 in the place of weight"
    )
    what = f"method.terms.{row.term}: at weight {row.weight:.3g} its gradient is"
    where = f"of the language loss's on {' and '.join(sorted(row.trains))}"
    if row.share < WHISPER:
        log.warning("%s %.2g %% %s, too little to show: %s", what, 100 * row.share, where, advice)
    elif row.share > DROWNS * (1 + 1e-9):  # a share of 1 is one to the last bit or two
        log.warning("%s %.0f %% %s and drowns it: %s", what, 100 * row.share, where, advice)
    else:
        log.info("%s %.1f %% %s", what, 100 * row.share, where)


def _obstacle(model: nn.Module) -> str | None:
    """Why this model's gradients cannot be read, or None."""
    sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if sharded or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "DeepSpeed keeps gradients to itself (recipes/hardware/fsdp2_8gpu.yaml does not)"
    return None
