"""Routing on a fixed sample of examples, before and after training.

Written to ``routing/before.json`` and ``routing/after.json``; the report draws them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from moe_finetune.io import write_atomic
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import in_mode, model_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.routing.measures import NEEDS
from moe_finetune.routing.picture import PASSAGE, PASSAGES, passage, snapshot
from moe_finetune.training import ranks
from moe_finetune.training.sample import MAX_TOKENS, Sample

BATCH = 1024
Example = Mapping[str, Any]


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
    device = next(model.parameters()).device
    recorder = Recorder(
        model, observers=[sample], needs=NEEDS, observe="all", perturbation=perturbation
    )
    with in_mode(model, train=False), torch.no_grad(), recorder:
        for inputs in _batches([row["input_ids"] for row in rows], device):
            model(**inputs, use_cache=False, logits_to_keep=1)
    # Every rank took part, because the model may be sharded; rank 0 writes.
    if ranks.rank() > 0:
        return {}
    picture = {"data": data, **_picture(sample, rows, tokenizer)}
    write_atomic(path, json.dumps(picture))
    return picture


def _batches(rows: list[list[int]], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of consecutive rows, ``BATCH`` tokens with padding, or one longer row."""
    start = 0
    while start < len(rows):
        end, longest = start, 0
        while end < len(rows) and (
            end == start or max(longest, len(rows[end])) * (end - start + 1) <= BATCH
        ):
            longest = max(longest, len(rows[end]))
            end += 1
        ids_BS = torch.zeros(end - start, longest, dtype=torch.long)
        mask_BS = torch.zeros_like(ids_BS)
        for index, row in enumerate(rows[start:end]):
            ids_BS[index, : len(row)] = torch.tensor(row)
            mask_BS[index, : len(row)] = 1
        yield {"input_ids": ids_BS.to(device), "attention_mask": mask_BS.to(device)}
        start = end


def _picture(sample: Sample, rows: list[Example], tokenizer: Any) -> dict[str, Any]:
    domain_T = np.repeat([row["domain"] for row in rows], [len(row["input_ids"]) for row in rows])
    names = list(dict.fromkeys(row["domain"] for row in rows))
    return snapshot(
        sample.routing(),
        sample.metrics(),
        sample.measures,
        sample.embeddings(sample.middle),
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
