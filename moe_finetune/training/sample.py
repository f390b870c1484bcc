"""Routing of sampled tokens: before training, at evaluations, and after it.

``routing/before.json`` and ``routing/after.json`` have a fixed sample; the report draws them.

Shape legend: T tokens, N tokens whose embeddings are kept, E routed experts, K selected, H hidden,
D expert width.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from moe_finetune.io import write_atomic
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
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import in_mode, model_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.routing.measures import NEEDS, Measures
from moe_finetune.routing.picture import PASSAGE, PASSAGES, passage, routing_path, snapshot
from moe_finetune.training import ranks

MAX_TOKENS = 8192
MAX_EMBEDDINGS = 1500
MAX_BATCHES = 8
MEASURED = (
    *("entropy", "routing_variance", "router_cosine", "noise_level"),
    *("activation_cosine", "output_cosine"),
)
BATCH = 1024
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
Example = Mapping[str, Any]


class Sample:
    """Observer that keeps what metrics and pictures need from the first tokens it sees.

    Embeddings are too large to keep all. A seeded draw keeps those of ``MAX_EMBEDDINGS`` tokens,
    the same in every layer. The number of tokens is not known in advance, so each token gets a
    random priority and the lowest ones are kept.

    Attributes:
        layers: decoder indices of the MoE layers; pictures show the layer ``middle``.
        measures: sums over the same tokens.
    """

    def __init__(self, facts: ModelFacts, max_tokens: int = MAX_TOKENS):
        self.layers = list(facts.moe_layers)
        self.middle = self.layers[len(self.layers) // 2]
        self.num_experts, self.top_k = facts.num_experts, facts.top_k
        self._priority_T = np.random.default_rng(0).permutation(max_tokens)
        self._seen = dict.fromkeys(self.layers, 0)
        self._kept: dict[str, dict[int, list[np.ndarray]]] = {}
        self.measures = Measures(self.layers, self.num_experts, self.top_k, gate_values=False)

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


def sample_examples(
    sources: Sequence[tuple[str, Iterable[Example]]], max_length: int
) -> list[Example]:
    """Select rows with ``input_ids`` and ``domain``, 8,192 tokens in all, for snapshots.

    Args:
        sources: path and prepared rows of each source of the data. Each contributes its first rows,
            an equal part of the tokens, as a domain of its name.
        max_length: rows are truncated to it, as in training.
    """
    examples: list[Example] = []
    for path, rows in sources:
        name = _name(path)
        cut = ({"input_ids": row["input_ids"][:max_length], "domain": name} for row in rows)
        examples += first_rows(cut, MAX_TOKENS // len(sources))
    return examples


def _name(file: str) -> str:
    return Path(file).name.partition(".")[0] or file


def first_rows(rows: Iterable[Example], tokens: int) -> list[Example]:
    """The first ``tokens`` tokens of ``rows``; the last row is truncated."""
    selected: list[Example] = []
    for row in rows:
        selected.append({**row, "input_ids": row["input_ids"][:tokens]})
        tokens -= len(selected[-1]["input_ids"])
        if tokens <= 0:
            break
    return selected


def take_snapshot(
    model: nn.Module,
    examples: Iterable[Example],
    path: Path,
    perturbation: Perturbation | None = None,
    tokenizer: Any = None,
    data: Literal["validation", "train"] | None = None,
) -> dict[str, Any]:
    """Record the routing of ``examples`` (see :func:`sample_examples`) and write it to ``path``.

    The model stays in its train or eval mode. ``tokenizer``: to show text in the experts' colors.
    ``data``: where the examples come from, for the report.
    """
    sample = Sample(model_facts(model))
    rows = list(examples)
    with Recorder(model, observers=[sample], needs=NEEDS, observe="all", perturbation=perturbation):
        _run(model, _batches([row["input_ids"] for row in rows]))
    # Every rank took part, because the model may be sharded; rank 0 writes.
    if ranks.rank() > 0:
        return {}
    picture = {"data": data, **_picture(sample, rows, tokenizer)}
    write_atomic(path, json.dumps(picture))
    return picture


def _batches(rows: list[list[int]]) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of consecutive rows, ``BATCH`` tokens with padding, or one longer row."""
    batch: list[list[int]] = []
    for row in rows:
        if batch and max(map(len, [*batch, row])) * (len(batch) + 1) > BATCH:
            yield _padded(batch)
            batch = []
        batch.append(row)
    if batch:
        yield _padded(batch)


def _padded(rows: list[list[int]]) -> dict[str, Tensor]:
    masks = [torch.ones(len(row), dtype=torch.long) for row in rows]
    return {
        "input_ids": pad_sequence([torch.tensor(row) for row in rows], batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }


def _picture(sample: Sample, rows: list[Example], tokenizer: Any) -> dict[str, Any]:
    domain_T = np.repeat([row["domain"] for row in rows], [len(row["input_ids"]) for row in rows])
    names = list(dict.fromkeys(row["domain"] for row in rows))
    return snapshot(
        sample.routing(),
        sample.metrics(),
        sample.measures,
        {name: _counts(sample, domain_T == name) for name in names},
        None if tokenizer is None else _passages(sample, rows, tokenizer, names),
    )


def _counts(sample: Sample, here_T: np.ndarray) -> list[list[int]]:
    return [
        np.bincount(
            sample.rows("index", layer)[here_T].ravel(), minlength=sample.num_experts
        ).tolist()
        for layer in sample.layers
    ]


def _passages(
    sample: Sample, rows: list[Example], tokenizer: Any, names: list[str]
) -> list[dict[str, Any]]:
    """The start of each domain's first example, with its experts in the middle layer."""
    top_T, index_TK = sample.top_T(sample.middle), sample.rows("index", sample.middle)
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    passages = []
    for name in names[:PASSAGES]:
        index = next(n for n, row in enumerate(rows) if row["domain"] == name)
        ids = rows[index]["input_ids"][:PASSAGE]
        span = slice(int(starts[index]), int(starts[index]) + len(ids))
        passages.append(passage(tokenizer, sample.middle, name, ids, top_T[span], index_TK[span]))
    return passages


def evaluation_sample(recorder: Recorder, batches: Iterable[Any]) -> Sample | None:
    """Record the routing of an evaluation's first batches, the same on any number of ranks.

    None if batches have no tokens: GRPO evaluates on prompts that its trainer completes.

    Every rank runs the same undivided batches, because accelerate's division repeats rows if they
    do not divide evenly. Every rank must call this: with a sharded model each takes part in the
    others' forwards.
    """
    model: Any = recorder.model
    sample = Sample(model_facts(model))
    has_tokens = False
    with (
        recorder.using(observers=(sample,), needs=NEEDS, observe="all"),
        # What a loader draws to start must not change what training draws next.
        torch.random.fork_rng(devices=[]),
    ):
        for batch in itertools.islice(undivided(batches), MAX_BATCHES):
            inputs = list(token_inputs(batch))
            has_tokens = has_tokens or bool(inputs)
            _run(model, inputs)
    return sample if has_tokens else None


def _run(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> None:
    """Forwards that only observers read."""
    device = next(model.parameters()).device
    with in_mode(model, train=False), torch.no_grad():
        for inputs in batches:
            on_device = {name: values.to(device) for name, values in inputs.items()}
            model(**on_device, use_cache=False, logits_to_keep=1)


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
