"""The strength of each loss term: its gradient norm relative to that of the trainer's loss.

Definition: over one window (the micro-batches of an optimizer step), a term's *share* is the norm
of its weighted gradient divided by the norm of the gradient of the trainer's loss, on the same
parameters: the trained ones of the routers or of the routed experts. The weight is the full one,
before any schedule. A term that trains both parts has two shares; the larger one counts.
"""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import LARGEST_WEIGHT, Term
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.checkpointing import saves_some
from moe_finetune.moe.layers import places_in
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.training import ranks
from moe_finetune.training.measures.term_gradients import PARTS, TermGradients
from moe_finetune.training.reached_weights import trained_parts

WHISPER = 0.01
AIM = 0.1
DROWNS = 1.0
"""Shares: below the first, a term has no visible effect; above the last, it dominates."""

Products = Mapping[str, tuple[float, float, float]]
"""By part: squared norms of the term's and the trainer's gradients, and their inner product."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TermStrength:
    """One term's gradient on one window relative to that of the trainer's loss.

    ``shares`` and ``cosines`` are by part, at weight 1; empty without a gradient. ``weight``: the
    full one; 0 for a share whose weight is not found yet.
    """

    term: str
    trains: frozenset[str]
    weight: float
    shares: Mapping[str, float]
    cosines: Mapping[str, float]

    @property
    def at_one(self) -> float:
        """The share at weight 1: the largest over the trained parts, else over those reached."""
        mainly = [share for part, share in self.shares.items() if part in self.trains]
        return max(mainly or self.shares.values(), default=0.0)

    @property
    def share(self) -> float:
        """The share at the term's weight."""
        return self.weight * self.at_one

    def weight_for(self, share: float) -> float | None:
        """The weight that gives this share; None if a gradient is missing or vanishes."""
        weight = share / self.at_one if self.at_one > 0 else math.inf
        return weight if weight <= LARGEST_WEIGHT else None

    @property
    def missing(self) -> str:
        """Why no weight gives the term a share."""
        if not self.shares:
            return "the trainer's loss has no gradient where the term acts"
        if self.at_one > 0:
            return f"the weight would be more than {LARGEST_WEIGHT:g}"
        return "the term has no gradient (its goal is met)"

    def row(self) -> dict[str, Any]:
        """The term's row in the result of :func:`measure_strength`."""
        shares = {part: share * self.weight for part, share in self.shares.items()}
        return {
            "term": self.term,
            "weight": self.weight,
            **{f"share_{part}": shares.get(part) for part in PARTS},
            **{f"cosine_{part}": self.cosines.get(part) for part in PARTS},
            "weight_for_10_percent": self.weight_for(AIM),
        }


class StrengthMeter:
    """Measures the objective's terms in a run's first window, and where a share needs a weight.

    A share needs one until a window gives it one, and at each multiple of its term's ``every``. The
    weight acts from the next step on; without a gradient it stays as it is.
    """

    def __init__(self, recorder: Recorder, objective: Objective, first: bool = True):
        self.recorder = recorder
        self.objective = objective
        self.first = first
        self.rows: list[TermStrength] = []
        self._gradients: TermGradients | None = None
        self._step = 0

    def begin(self, step: int) -> None:
        """Prepare to measure the window of optimizer step ``step`` (0-based), if it is due."""
        self.close()
        self._step = step
        shares = self._due()
        if not self.objective.terms or not (shares or (step == 0 and self.first)):
            return
        if (obstacle := _obstacle(self.recorder, bool(shares))) is None:
            self._gradients = TermGradients(self.recorder, list(self.objective.full_weights))
            self._gradients.start()
        elif unset := [name for name in shares if self.objective.full_weights[name] is None]:
            raise ObjectiveError(
                f"method.terms.{unset[0]}.share: its weight cannot be found: {obstacle}; or give "
                "a weight instead"
            )
        else:
            log.warning("the losses' shares are not measured: %s", obstacle)

    def end(self) -> list[TermStrength]:
        """After an optimizer step, compare the gradients of a window that was due, on every rank.

        Sets the weights that are due; no rows if none was, or if gradients are not finite.
        """
        gradients, shares = self._gradients, self._due()
        if gradients is None:
            return []
        self.close()
        problem = "" if gradients.count else "no gradient reached the model"
        if not problem:
            products = gradients.products()
            rows = [self._row(term, products[term.name]) for term in self.objective.terms]
            problem = "" if all(map(_finite, rows)) else "a gradient is not finite"
        if problem:
            log.warning("step %d: %s; shares are not measured", self._step + 1, problem)
            return []
        self.rows = [
            self._with_weight(row, shares[row.term]) if row.term in shares else row for row in rows
        ]
        for row in self.rows if ranks.rank() == 0 else ():
            if row.weight or row.term not in shares:
                _report(row)
        return self.rows

    def close(self) -> None:
        if self._gradients is not None:
            self._gradients.stop()
            self._gradients = None

    def finish(self) -> None:
        """After the last step, report shares that never had a weight."""
        self.close()
        for term in self.objective.terms:
            if term.options.share is not None and self.objective.full_weights[term.name] is None:
                log.warning(
                    "method.terms.%s.share: no window gave it a weight; the term had no effect",
                    term.name,
                )

    def _due(self) -> dict[str, float]:
        """The shares that this step's window gives a weight."""
        shares: dict[str, float] = {}
        for term in self.objective.terms:
            share, every = term.options.share, term.options.every
            again = every is not None and self._step % every == 0
            if share is not None and (again or self.objective.full_weights[term.name] is None):
                shares[term.name] = share
        return shares

    def _row(self, term: Term, products: Products) -> TermStrength:
        shares, cosines = dict[str, float](), dict[str, float]()
        for part, (term_square, trainers_square, inner) in products.items():
            if trainers_square != 0:
                shares[part] = math.sqrt(term_square / trainers_square)
                norms = math.sqrt(term_square * trainers_square)
                cosines[part] = inner / norms if norms else 0.0
        weight = self.objective.full_weights[term.name] or 0.0
        return TermStrength(term.name, frozenset(term.trains), weight, shares, cosines)

    def _with_weight(self, row: TermStrength, share: float) -> TermStrength:
        """The row at the weight that gives ``share``, which acts from now on."""
        weight = row.weight_for(share)
        if weight is not None:
            self.objective.set_full_weight(row.term, weight)
            return replace(row, weight=weight)
        where = f"step {self._step + 1}: method.terms.{row.term}.share: {row.missing}"
        if row.weight:
            log.warning("%s in this window; its weight stays %.3g", where, row.weight)
        elif self._step == 0:
            log.warning(
                "%s in this window; the term has no effect until a window gives it a weight", where
            )
        return row


def _finite(row: TermStrength) -> bool:
    return all(map(math.isfinite, (*row.shares.values(), *row.cosines.values())))


def _report(row: TermStrength) -> None:
    """Log a line; warn if the term is negligible or dominates the trainer's loss."""
    what, trained = f"method.terms.{row.term}", sorted(row.trains.intersection(row.shares))
    if not row.shares:
        log.info("%s: not measured, because %s", what, row.missing)
        return
    if not trained:
        log.warning(
            "%s: it acts on the %s, frozen here, so it can act only through the %s of earlier "
            "layers; at weight %.3g its gradient is %.2g %% of that of the trainer's loss there",
            *(what, " and ".join(sorted(row.trains)), " and ".join(sorted(row.shares))),
            *(row.weight, 100 * row.share),
        )
        return
    aim = row.weight_for(AIM)
    advice = (
        "no weight changes that while its goal is met"
        if aim is None
        else f"weight {aim:.3g} would be 10 %, and so would share: 0.1 instead of weight"
    )
    what = f"{what}: at weight {row.weight:.3g} its gradient is"
    where = f"of that of the trainer's loss on {' and '.join(trained)}"
    if row.share < WHISPER:
        log.warning("%s %.2g %% %s, too little to show: %s", what, 100 * row.share, where, advice)
    elif row.share > DROWNS * (1 + 1e-9):  # a share of 1 is exact only up to the last bits
        log.warning("%s %.0f %% %s and drowns it: %s", what, 100 * row.share, where, advice)
    else:
        log.info("%s %.1f %% %s", what, 100 * row.share, where)


def _obstacle(recorder: Recorder, shares: bool) -> str | None:
    """Why gradients cannot be read or, for ``shares``, not compared; None if they can."""
    sharded = any(hasattr(parameter, "ds_id") for parameter in recorder.model.parameters())
    if sharded or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "DeepSpeed does not expose gradients (recipes/hardware/fsdp2_8gpu.yaml does not)"
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()  # a trainer's torch_compile
    modules = recorder.model.modules()
    if backend != "no" or any(getattr(m, "_compiled_call_impl", None) for m in modules):
        return "torch.compile allows one backward; set torch_compile: false"
    if saves_some(recorder.backbone.layers):
        return (
            "selective checkpointing allows one backward; leave `selective` out of "
            "gradient_checkpointing_kwargs"
        )
    if not shares or any(map(trained_parts, recorder.layers)):
        return None
    places = places_in(recorder.model)
    targets = [*places.expert_targets, places.router_target]
    return (
        "gradients are compared on routers and routed experts, and neither trains; add LoRA to "
        f"them: LoraConfig(target_parameters={targets}), in a recipe lora.targets: [experts]"
    )
