"""Routing of sampled tokens: before training, at evaluations, and after it.

Shape legend: T tokens, N tokens whose embeddings are kept, E routed experts, K selected, H hidden,
D expert width.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from moe_finetune.metrics import conditional_activation
from moe_finetune.metrics.arrays import mean_known
from moe_finetune.metrics.experts import separation
from moe_finetune.metrics.paths import top_choice
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.observe import observed
from moe_finetune.routing.measures_of_model import Measures
from moe_finetune.routing.snapshot_file import PASSAGE, PASSAGES, passage, routing_path, snapshot
from moe_finetune.routing.sums import NEEDS
from moe_finetune.training import ranks

MAX_TOKENS = 8192
MAX_EMBEDDINGS = 1500
MAX_BATCHES = 8
MEASURED = (
    *("max_violation", "score_variance", "expert_overlap", "silhouette"),
    *("entropy", "routing_variance", "router_cosine", "noise_level"),
    *("activation_cosine", "output_cosine"),
)
VECTORS = ("coupling_mass", "mutual_coherence", "below_barrier")
"""Metrics of a snapshot, and what an evaluation logs besides."""
BATCH = 1024
MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
Example = Mapping[str, Any]


class Sample:
    """Observer that sums the first tokens it sees, and keeps of some what pictures need.

    Embeddings of ``MAX_EMBEDDINGS`` tokens are kept, the same in every layer: each token gets a
    seeded priority, because their number is not known in advance. ``group_T``: the domain of each
    token.
    """

    def __init__(
        self, facts: ModelFacts, max_tokens: int = MAX_TOKENS, group_T: np.ndarray | None = None
    ):
        self.layers = list(facts.moe_layers)
        self.middle = self.layers[len(self.layers) // 2]
        self.shown = self.layers[len(self.layers) // 2 :][:2]
        self.num_experts, self.top_k = facts.num_experts, facts.top_k
        self._priority_T = np.random.default_rng(0).permutation(max_tokens)
        self._seen = dict.fromkeys(self.layers, 0)
        self._kept: dict[tuple[str, int], list[np.ndarray]] = {}
        self._group_T = None if group_T is None else torch.from_numpy(group_T)
        groups = 1 if group_T is None else int(group_T.max()) + 1
        self.measures = Measures(facts, groups=groups)

    def __call__(self, record: RoutingRecord, _: LayerLoss) -> None:
        layer = record.layer
        first = self._seen[layer]
        at_T = record.mask_T.nonzero().squeeze(1)[: len(self._priority_T) - first]
        end = self._seen[layer] = first + len(at_T)
        group_T = None if self._group_T is None else self._group_T[first:end].to(at_T.device)
        self.measures.add(record, group_T, at_T)
        index_TK, scores_TK = _host(record.index_TK[at_T]), _host(record.scores_TK[at_T])
        top_T, drawn = top_choice(index_TK, scores_TK), self._drawn(end)
        drawn_N = drawn[drawn >= first] - first
        inputs_NH = record.inputs_TH[at_T[torch.from_numpy(drawn_N).to(at_T.device)]].float()
        arrays = {"inputs": _host(inputs_NH), "label": top_T[drawn_N], "at": first + drawn_N}
        if layer in self.shown:
            arrays |= {"index": index_TK, "top": top_T}
        for name, rows in arrays.items():
            self._kept.setdefault((name, layer), []).append(rows)

    def _drawn(self, count: int) -> np.ndarray:
        """Ascending positions of the drawn tokens among the first ``count``."""
        if count <= MAX_EMBEDDINGS:
            return np.arange(count)
        lowest = np.argpartition(self._priority_T[:count], MAX_EMBEDDINGS)
        return np.sort(lowest[:MAX_EMBEDDINGS])

    def rows(self, name: str, layer: int) -> np.ndarray:
        """``index`` (T, K) or ``top`` (T,) of the layers in ``shown``."""
        return np.concatenate(self._kept[name, layer])

    def embeddings(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Block inputs ``(N, H)`` of the drawn tokens, and their top experts ``(N,)``."""
        at_N = np.searchsorted(self.rows("at", layer), self._drawn(self._seen[layer]))
        return self.rows("inputs", layer)[at_N], self.rows("label", layer)[at_N]

    def metrics(self) -> dict[str, list[float | None]]:
        """Metrics by name, each a list over layers; None where a metric does not exist."""
        measured = self.measures.per_layer()
        overlap, clusters = zip(
            *(separation(*self.embeddings(n)) for n in self.layers), strict=True
        )
        measured |= {"expert_overlap": list(overlap), "silhouette": list(clusters)}
        return {name: measured[name] for name in (*MEASURED, *VECTORS) if name in measured}

    def routing(self) -> dict[str, Any]:
        """Load of every layer, and the path from the middle layer to the next, as JSON values."""
        matrix_EE = None
        if len(self.shown) == 2:
            index, following = (self.rows("index", layer) for layer in self.shown)
            matrix_EE = conditional_activation(index, following, self.num_experts)
        load_LE, tokens = self.measures.sums.load_LE(), self._seen[self.layers[0]]
        return routing_path(self.layers, load_LE, tokens, self.top_k, matrix_EE)


def _host(rows: Tensor) -> np.ndarray:
    return rows.detach().cpu().numpy()


def sample_examples(
    sources: Sequence[tuple[str, Iterable[Example]]], max_length: int
) -> list[Example]:
    """Rows with ``input_ids`` and ``domain``, 8,192 tokens in all: an equal part of each source."""
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
    tokenizer: Tokenizer | None = None,
    data: Literal["validation", "train"] | None = None,
) -> dict[str, Any]:
    """Record the routing of ``examples`` (see :func:`sample_examples`) and write it to ``path``.

    ``tokenizer``: to show text in the experts' colors; ``data``: where the examples come from.
    """
    rows = list(examples)
    names = list(dict.fromkeys(row["domain"] for row in rows))
    domains = [names.index(row["domain"]) for row in rows]
    group_T = np.repeat(domains, [len(row["input_ids"]) for row in rows])
    sample = Sample(model_facts(model), group_T=group_T)
    with observed(model, sample, NEEDS, perturbation=perturbation):
        forward_all(model, [row["input_ids"] for row in rows])
    # Every rank took part, because the model may be sharded; rank 0 writes.
    if ranks.rank() > 0:
        return {}
    picture = {"data": data, **_picture(sample, rows, names, tokenizer)}
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


def _picture(
    sample: Sample, rows: list[Example], names: list[str], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    sums, metrics = sample.measures.sums, sample.metrics()
    load_GLE = sums.column(sums.array(), "load").astype(int)
    return snapshot(
        sample.routing(),
        {name: metrics[name] for name in MEASURED if name in metrics},
        sample.measures.coherence(metrics),
        dict(zip(names, load_GLE, strict=True)),
        None if tokenizer is None else _passages(sample, rows, tokenizer, names),
    )


def _passages(
    sample: Sample, rows: list[Example], tokenizer: Tokenizer, names: list[str]
) -> list[dict[str, Any]]:
    """The start of each domain's first example, with its experts in the middle layer."""
    top_T, index_TK = (sample.rows(name, sample.middle) for name in ("top", "index"))
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows)])
    passages = []
    for name in names[:PASSAGES]:
        index = next(n for n, row in enumerate(rows) if row["domain"] == name)
        ids = rows[index]["input_ids"][:PASSAGE]
        span = slice(int(starts[index]), int(starts[index]) + len(ids))
        passages.append(passage(tokenizer, sample.middle, name, ids, top_T[span], index_TK[span]))
    return passages


def evaluation_sample(recorder: Recorder, batches: Iterable[Any]) -> Sample | None:
    """Record the routing of an evaluation's first batches; None if they have no tokens (GRPO's).

    Every rank runs the same undivided batches, because accelerate's division repeats rows, and
    because with a sharded model each takes part in the others' forwards.
    """
    model: nn.Module = recorder.model
    sample = Sample(model_facts(model))
    has_tokens = False
    with observed(model, sample, NEEDS, recorder=recorder):
        for batch in itertools.islice(undivided(batches), MAX_BATCHES):
            inputs = list(token_inputs(batch))
            has_tokens = has_tokens or bool(inputs)
            _run(model, inputs)
    return sample if has_tokens else None


def forward_all(model: nn.Module, rows: list[list[int]]) -> None:
    """Run rows of token ids through the model, padded."""
    _run(model, _batches(rows))


def _run(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> None:
    device = next(model.parameters()).device
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

    Left before its end, accelerate's wrapper would remain the "active" loader and confuse training.
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
    """Means over layers: ``eval_routing/<name>``."""
    return {
        f"eval_routing/{name}": mean
        for name, values in sample.metrics().items()
        if (mean := mean_known(values)) is not None
    }
