"""Experts of each layer that a task relies on, to train only these.

They are taken in descending order of their relevance to a task: until the running sum of the
relevance, normalized to 1 per layer, reaches ``top_p`` (ESFT, Wang et al. 2024, arXiv 2407.01906),
or as many in each layer as a share of its experts is (HELLoRA, arXiv 2605.18795; MoE-Sieve,
arXiv 2603.24044).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from moe_finetune.errors import DataError
from moe_finetune.io import write_new
from moe_finetune.io.json_file import read_json
from moe_finetune.metrics.arrays import Array, chunks, floats, integers

Score = Literal["token", "gate"]


def expert_relevance(
    index_TLK: Array, weights_TLK: Array | None, num_experts: int, score: Score = "token"
) -> np.ndarray:
    """Relevance of each expert, ``(L, E)`` float64, rows sum to 1.

    ``token``: share of the dispatches that go to the expert (ESFT eq. 5). ``gate``: mean routing
    weight (ESFT eq. 4), normalized per layer; needs ``weights_TLK`` of the shape of ``index_TLK``
    ``(T, L, K)``.
    """
    if score not in ("token", "gate"):
        raise ValueError(f"score: got {score!r}, expected 'token' or 'gate'")
    index = integers("index_TLK", index_TLK, ("T", "L", "K"), limit=num_experts)
    tokens, layers, width = index.shape
    weights = None
    if score == "gate":
        if weights_TLK is None:
            raise ValueError(f"weights_TLK: got None, expected {index.shape} for the gate score")
        weights = floats("weights_TLK", weights_TLK, index.shape, as_given=True)
    relevance_LE = np.zeros((layers, num_experts))
    for part in chunks(tokens, layers * width):
        for layer in range(layers):
            relevance_LE[layer] += np.bincount(
                index[part, layer].ravel(),
                None if weights is None else weights[part, layer].ravel(),
                minlength=num_experts,
            )
    totals = relevance_LE.sum(-1, keepdims=True)
    if not totals.all():
        raise ValueError(f"weights_TLK: all weights of layer {int(totals.argmin())} are 0")
    return relevance_LE / totals


def select_experts(
    index_TLK: Array,
    weights_TLK: Array | None,
    num_experts: int,
    score: Score = "token",
    top_p: float = 0.2,
) -> list[list[int]]:
    """Select the experts of each layer that a task relies on, most relevant first.

    Args:
        index_TLK: ``(T, L, K)`` selected experts per token and MoE layer.
        weights_TLK: their routing weights, same shape; may be None with ``score="token"``.
        num_experts: routed experts E of a layer.
        score: see :func:`expert_relevance`.
        top_p: share of the relevance that the selected experts must reach together, in (0, 1]; the
            expert that reaches it is included.

    Returns a list per layer; equal relevances go to the lower expert index. An expert that no
    token uses is never selected.
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, expected a share above 0 and at most 1")
    return top_p_experts(expert_relevance(index_TLK, weights_TLK, num_experts, score), top_p)


def top_p_experts(relevance_LE: np.ndarray, top_p: float) -> list[list[int]]:
    """The most relevant experts of each layer, until their relevance sums to ``top_p``."""
    return [_until(relevance_E, top_p) for relevance_E in relevance_LE]


def top_experts(relevance_LE: np.ndarray, top: float) -> list[list[int]]:
    """The ``ceil(top * E)`` most relevant experts of each layer, at least one, used or not.

    Equal relevances go to the lower expert index.
    """
    if not 0 < top <= 1:
        raise ValueError(f"top: got {top}, expected a share above 0 and at most 1")
    count = count_of(top, relevance_LE.shape[1])
    order_LE = np.argsort(-relevance_LE, axis=1, kind="stable")
    return [[int(expert) for expert in order_E[:count]] for order_E in order_LE]


def count_of(share: float, total: int) -> int:
    """``ceil(share * total)``, at least 1."""
    # 0.07 * 100 is 7.000000000000001, and means 7.
    return max(1, math.ceil(share * total - 1e-9))


def share_of(sums_LE: np.ndarray) -> np.ndarray:
    """Sums of each layer's experts as shares: rows sum to 1."""
    return np.asarray(sums_LE / sums_LE.sum(-1, keepdims=True))


def reap_relevance(
    index_TLK: Array, weights_TLK: Array, norms_TLK: Array, num_experts: int
) -> np.ndarray:
    """Mean contribution of each expert to its tokens, ``(L, E)``, rows sum to 1.

    Over the tokens that select it, the mean of its routing weight times the L2 length of its output
    before the weight (REAP, arXiv 2510.13999); 0 for an expert without tokens. The three arrays are
    ``(T, L, K)``.
    """
    index = integers("index_TLK", index_TLK, ("T", "L", "K"), limit=num_experts)
    weights = floats("weights_TLK", weights_TLK, index.shape, as_given=True)
    norms = floats("norms_TLK", norms_TLK, index.shape, as_given=True)
    tokens, layers, width = index.shape
    counts_LE, sums_LE = np.zeros((2, layers, num_experts))
    for part in chunks(tokens, layers * width):
        for layer in range(layers):
            ids = index[part, layer].ravel()
            products = weights[part, layer].astype(float) * norms[part, layer]
            counts_LE[layer] += np.bincount(ids, minlength=num_experts)
            sums_LE[layer] += np.bincount(ids, products.ravel(), minlength=num_experts)
    means_LE = sums_LE / np.maximum(counts_LE, 1)
    totals_L1 = means_LE.sum(-1, keepdims=True)
    if not totals_L1.all():
        raise ValueError(f"norms_TLK: all outputs of layer {int(totals_L1.argmin())} are 0")
    return means_LE / totals_L1


def kept_experts(relevance_LE: np.ndarray, share: float, groups: int = 1) -> list[list[int]]:
    """A share of each layer's experts to keep, ascending: as many of each of the groups.

    The ``ceil(share * E / groups)`` most relevant of each; equal relevances go to the lower index.
    """
    layers, total = relevance_LE.shape
    size = total // groups
    best = top_experts(relevance_LE.reshape(layers * groups, size), share)
    numbered = [[row % groups * size + expert for expert in ids] for row, ids in enumerate(best)]
    of_layers = (numbered[row * groups : (row + 1) * groups] for row in range(layers))
    return [sorted(chain(*of_groups)) for of_groups in of_layers]


def gained_relevance(
    before_TLK: Array, after_TLK: Array, num_experts: int, layers: Sequence[int] = ()
) -> np.ndarray:
    """What each expert's share of the dispatches rose by, ``(L, E)``, rows sum to 1.

    The experts to which a router turned when only routers were trained (Router Lens, arXiv
    2508.19594). An expert whose share fell has 0. ``layers``: their numbers, for the message.
    """
    before_LE = expert_relevance(before_TLK, None, num_experts)
    gained_LE = np.maximum(expert_relevance(after_TLK, None, num_experts) - before_LE, 0)
    totals_L = gained_LE.sum(-1)
    if not totals_L.all():
        layer = int(totals_L.argmin())
        name = layers[layer] if layers else layer
        raise DataError(
            f"--score gained: in layer {name} no expert's share rose; train routers first "
            "(lora.targets: [], router.train: full), and trace that run's model as AFTER"
        )
    return gained_LE / totals_L[:, None]


def _until(relevance_E: np.ndarray, top_p: float) -> list[int]:
    order = np.argsort(-relevance_E, kind="stable")
    sums = np.cumsum(relevance_E[order])
    # Sums of shares such as 0.05 + 0.15 must count as 0.2 whatever their last bit says.
    count = int(np.searchsorted(sums, top_p - 1e-9)) + 1
    used = int(np.count_nonzero(relevance_E))
    return [int(expert) for expert in order[: min(count, used)]]


def _layer(key: Any) -> int:
    if not str(key).isdigit() or str(int(key)) != str(key):
        raise ValueError(f"'{key!s:.40}' is not the number of a decoder layer")
    return int(key)


Layer = Annotated[int, BeforeValidator(_layer)]
Count = Annotated[int, Field(strict=True, ge=1)]
Experts = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]


@dataclass(frozen=True)
class ExpertSelection:
    """Chosen experts per decoder layer, and how they were chosen (None if a file does not say).

    Attributes:
        weight_share: of the routing weights of the ``tokens`` that were measured, theirs.
    """

    experts: dict[Layer, Experts]
    model_type: str | None = None
    num_experts: Count | None = None
    score: str | None = None
    top_p: float | None = None
    top: float | None = None
    keep: float | None = None
    weight_share: float | None = None
    tokens: int | None = None

    @model_validator(mode="after")
    def _ids(self) -> ExpertSelection:
        for layer, ids in self.experts.items():
            if len(set(ids)) != len(ids):
                raise ValueError(f"experts of layer {layer}: some id is listed twice: {ids}")
            if self.num_experts is not None and max(ids) >= self.num_experts:
                raise ValueError(
                    f"experts of layer {layer}: id {max(ids)} does not exist, the layer has "
                    f"experts 0 to {self.num_experts - 1}"
                )
        return self

    def write(self, path: str | Path) -> None:
        experts = {str(layer): ids for layer, ids in sorted(self.experts.items())}
        document = {**asdict(self), "experts": experts}
        write_new(Path(path), json.dumps(document, indent=1) + "\n")

    def check(
        self,
        model_type: str,
        moe_layers: Sequence[int],
        num_experts: int,
        pruned: bool = False,
    ) -> None:
        """Raise DataError unless the selection fits a model with these facts.

        ``pruned``: experts had other numbers before; a file must then say how many it counts.
        """
        problem = None
        unknown = sorted(set(self.experts) - set(moe_layers))
        experts = ((max(ids), layer) for layer, ids in self.experts.items())
        last, layer = max(experts, default=(-1, None))
        if self.model_type not in (None, model_type):
            problem = f"made for model type '{self.model_type}', this checkpoint is '{model_type}'"
        elif self.num_experts not in (None, num_experts):
            problem = f"made for {self.num_experts} experts a layer, not for {num_experts}"
        elif pruned and self.num_experts is None:
            problem = (
                'has no "num_experts", and this checkpoint is pruned, which gave its experts '
                "other numbers"
            )
        elif unknown:
            problem = f"layers {unknown} are not MoE layers, which are {list(moe_layers)}"
        elif last >= num_experts:
            problem = f"layer {layer} names expert {last}, the last one is {num_experts - 1}"
        if problem:
            raise DataError(f"expert selection: {problem}; select again on this checkpoint")

    @classmethod
    def read(cls, path: str | Path) -> ExpertSelection:
        """Read a selection file, ours or ESFT's published ``{"experts": {...}, ...}``.

        Raises DataError that names the file and the wrong entry. ESFT files that also train shared
        experts or other modules are refused: name those in the recipe's targets instead.
        """
        document = read_json(Path(path), DataError, "write one with 'moe-finetune select'")
        for key in ("shared_experts", "non_expert_modules"):
            if isinstance(document, dict) and document.get(key):
                raise DataError(
                    f"{path}: {key} is true, which a selection file cannot set here; set it to "
                    "false and list those modules in lora.targets"
                )
        try:
            selection = TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            problem = first["msg"].removeprefix("Value error, ")
            raise DataError(
                f"{path}: not a selection file: {key + ': ' if key else ''}{problem}"
            ) from None
        return replace(selection, experts=dict(sorted(selection.experts.items())))
