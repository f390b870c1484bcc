"""Routing of sampled tokens, collected on the host, and the metrics that need vectors.

Shape legend: T tokens, N tokens whose embeddings are kept, E routed experts, K selected, H hidden,
D expert width.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch import Tensor
from torch.utils.data import DataLoader

from moe_finetune.losses.base import ModelFacts
from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics import (
    conditional_activation,
    coupling_mass,
    max_violation,
    score_variance,
)
from moe_finetune.metrics.arrays import from_layer, mean_known
from moe_finetune.metrics.experts import separation
from moe_finetune.metrics.paths import top_choice
from moe_finetune.moe.context import Observer
from moe_finetune.moe.hooks import Recorder
from moe_finetune.routing.measures import NEEDS, Measures
from moe_finetune.routing.picture import routing_path

MAX_TOKENS = 8192
MAX_EMBEDDINGS = 1500
MAX_BATCHES = 8
MEASURED = (
    *("entropy", "routing_variance", "router_cosine", "noise_level"),
    *("activation_cosine", "output_cosine"),
)
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class Sample:
    """Observer that keeps what metrics and pictures need from the first tokens it sees.

    Embeddings are too large to keep all. A seeded draw keeps those of ``MAX_EMBEDDINGS`` tokens,
    the same in every layer. The number of tokens is not known in advance, so each token gets a
    random priority and the lowest ones are kept.

    Attributes:
        layers: decoder indices of the MoE layers; pictures show the layer ``middle``.
        measures: sums over the same tokens.
    """

    def __init__(self, facts: ModelFacts, max_tokens: int = MAX_TOKENS, pictures: bool = True):
        self.layers = list(facts.moe_layers)
        self.middle = self.layers[len(self.layers) // 2]
        self.num_experts, self.top_k = facts.num_experts, facts.top_k
        self._priority_T = np.random.default_rng(0).permutation(max_tokens)
        self._seen = dict.fromkeys(self.layers, 0)
        self._kept: dict[str, dict[int, list[np.ndarray]]] = {}
        self.measures = Measures(
            self.layers, self.num_experts, self.top_k, False, pictures and facts.has_gate
        )

    def __call__(self, record: RoutingRecord, _: LayerLoss) -> None:
        layer = record.layer
        first = self._seen[layer]
        at_T = record.mask_T.nonzero().squeeze(1)[: len(self._priority_T) - first]
        end = self._seen[layer] = first + len(at_T)
        drawn = self._drawn(end)
        drawn_N = torch.from_numpy(drawn[drawn >= first] - first).to(at_T.device)
        self._note("index", layer, record.index_TK[at_T])
        self._note("weights", layer, record.scores_TK[at_T])
        self._note("scores", layer, record.scores_TE[at_T].float())
        self._note("probabilities", layer, record.distribution_TE[at_T].float())
        self._note("inputs", layer, record.inputs_TH[at_T[drawn_N]].float())
        self._note("inputs_at", layer, first + drawn_N)
        self.measures.add(record, at_T)

    def _note(self, name: str, layer: int, rows: Tensor) -> None:
        chunks = self._kept.setdefault(name, {}).setdefault(layer, [])
        chunks.append(rows.detach().cpu().numpy())

    def _drawn(self, count: int) -> np.ndarray:
        """Ascending positions of the drawn tokens among the first ``count``."""
        if count <= MAX_EMBEDDINGS:
            return np.arange(count)
        lowest = np.argpartition(self._priority_T[:count], MAX_EMBEDDINGS)
        return np.sort(lowest[:MAX_EMBEDDINGS])

    def rows(self, name: str, layer: int) -> np.ndarray:
        """``index`` (T, K), ``scores`` or ``probabilities`` (T, E), or Gram matrices (T, K, K)."""
        chunks = self._kept[name][layer]
        if len(chunks) > 1:
            self._kept[name][layer] = chunks = [np.concatenate(chunks)]
        return chunks[0]

    def load_E(self, layer: int) -> np.ndarray:
        return np.bincount(self.rows("index", layer).ravel(), minlength=self.num_experts)

    def top_T(self, layer: int) -> np.ndarray:
        return top_choice(self.rows("index", layer), self.rows("weights", layer))

    def embeddings(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Block inputs ``(N, H)`` of the drawn tokens, and their top experts ``(N,)``."""
        drawn_N = self._drawn(self._seen[layer])
        held_N = self.rows("inputs_at", layer)
        return (
            self.rows("inputs", layer)[np.searchsorted(held_N, drawn_N)],
            self.top_T(layer)[drawn_N],
        )

    def metrics(self) -> dict[str, list[float | None]]:
        """Metrics by name, each a list over layers; None where a metric does not exist."""
        measured = self.measures.per_layer()
        metrics: dict[str, list[float | None]] = {}
        for layer in self.layers:
            with from_layer(layer):
                overlap, clusters = separation(*self.embeddings(layer))
                values = {
                    "max_violation": max_violation(self.load_E(layer)),
                    "score_variance": score_variance(self.rows("scores", layer)),
                    "expert_overlap": overlap,
                    "silhouette": clusters,
                }
            for name, value in values.items():
                metrics.setdefault(name, []).append(None if value is None else float(value))
        return metrics | {name: measured[name] for name in MEASURED if name in measured}

    def coupling(self) -> list[float]:
        return [
            coupling_mass(
                self.rows("probabilities", lower),
                self.rows("index", lower),
                self.rows("probabilities", upper),
                self.top_k,
            )
            for lower, upper in pairwise(self.layers)
        ]

    def routing(self) -> dict[str, Any]:
        """Load of every layer, and the path from the middle layer to the next, as JSON values.

        ``conditional_activation`` contains the two layers and the matrix ``(E, E)`` of
        :func:`~moe_finetune.metrics.conditional_activation`; it is absent if no layer follows.
        """
        matrix_EE = None
        if self.middle != self.layers[-1]:
            next_layer = self.layers[self.layers.index(self.middle) + 1]
            matrix_EE = conditional_activation(
                self.rows("index", self.middle), self.rows("index", next_layer), self.num_experts
            )
        load_LE = np.stack([self.load_E(layer) for layer in self.layers])
        tokens = len(self.rows("index", self.layers[0]))
        return routing_path(self.layers, load_LE, tokens, self.top_k, matrix_EE)


@contextmanager
def observing(
    recorder: Recorder, observer: Observer, needs: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Replace an installed recorder's observers with ``observer`` inside the context."""
    with recorder.using(observers=(observer,), needs=needs, observe="all"):
        yield


def evaluation_sample(recorder: Recorder, batches: Iterable[Any]) -> Sample | None:
    """Record the routing of an evaluation's first batches, the same on any number of ranks.

    None if batches have no tokens: GRPO evaluates on prompts that its trainer completes.

    Every rank runs the same undivided batches, because accelerate's division repeats rows if they
    do not divide evenly. Every rank must call this: with a sharded model each takes part in the
    others' forwards.
    """
    from moe_finetune.moe.layers import in_mode, model_facts

    model: Any = recorder.model
    sample = Sample(model_facts(model), pictures=False)
    device = next(model.parameters()).device
    batches = undivided(batches)
    has_tokens = False
    with (
        in_mode(model, train=False),
        torch.no_grad(),
        observing(recorder, sample, NEEDS),
        # What a loader draws to start must not change what training draws next.
        torch.random.fork_rng(devices=[]),
    ):
        for batch_number, batch in enumerate(batches, start=1):
            for inputs in token_inputs(batch):
                has_tokens = True
                on_device = {name: values.to(device) for name, values in inputs.items()}
                model(**on_device, use_cache=False, logits_to_keep=1)
            if batch_number == MAX_BATCHES:
                break
    return sample if has_tokens else None


def token_inputs(batch: Any) -> Iterator[dict[str, Tensor]]:
    """Yield a batch's arguments for the model; ORPO's batches have one set per side of a pair."""
    if isinstance(batch, Mapping):
        for prefix in ("", "chosen_", "rejected_"):
            names = {name: f"{prefix}{name}" for name in MODEL_INPUTS}
            if batch.get(names["input_ids"]) is not None:
                yield {
                    name: batch[key] for name, key in names.items() if batch.get(key) is not None
                }


def undivided(batches: Any) -> Iterable[Any]:
    """The loader that accelerate divided among ranks; any other is returned unchanged.

    accelerate's wrapper is removed, too: if left before its end, it would remain the "active"
    loader and confuse training.
    """
    loader = getattr(batches, "base_dataloader", batches)
    sampler, dataset = (getattr(loader, name, None) for name in ("batch_sampler", "dataset"))
    if isinstance(sampler, BatchSamplerShard):
        inner = sampler.batch_sampler
        return DataLoader(loader.dataset, batch_sampler=inner, collate_fn=loader.collate_fn)
    if isinstance(dataset, IterableDatasetShard):
        inner = dataset.dataset
        return DataLoader(inner, batch_size=dataset.batch_size, collate_fn=loader.collate_fn)
    return loader


def evaluation_metrics(sample: Sample) -> dict[str, float]:
    """Metrics that need vectors, averaged over layers: ``eval_routing/<name>``."""
    metrics = sample.metrics()
    metrics["coupling_mass"] = list(sample.coupling())
    coherence = sample.measures.coherence()
    if coherence is not None:
        metrics["mutual_coherence"] = [row["mean"] for row in coherence["per_layer"]]
        metrics["below_barrier"] = [row["share_below"] for row in coherence["per_layer"]]
    return {
        f"eval_routing/{name}": mean
        for name, values in metrics.items()
        if (mean := mean_known(values)) is not None
    }
