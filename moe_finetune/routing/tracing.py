"""Run a model over sequences, write its routing as a trace, and sum what a trace lacks.

N are sampled tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.layers import causal_lm, family_in, model_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.moe.recorder.observe import observed
from moe_finetune.routing.measures_of_model import Measures
from moe_finetune.routing.sums import NEEDS
from moe_finetune.routing.trace_writer import TraceWriter

EMBEDDINGS = 4000
AT_ONCE = 8192


def trace_model(
    model: nn.Module,
    sequences: Mapping[str, Sequence[np.ndarray]],
    folder: Path,
    *,
    checkpoint: str,
    probabilities: bool = False,
    norms: bool = False,
    perturbation: Perturbation | None = None,
) -> Measures:
    """Write the routing of ``sequences`` (token ids by domain) to the new or empty ``folder``.

    Consecutive sequences of equal length share a forward; nothing is padded. Embeddings of about
    4,000 tokens are sampled. The model stays in its train or eval mode. ``norms``: also store the
    length of each selected expert's output. ``perturbation`` is a change to routing that belongs to
    the model, such as a loss-free bias.
    """
    config: Any = causal_lm(model).config
    facts = model_facts(model)
    device = next(model.parameters()).device
    records: list[RoutingRecord] = []

    def keep(record: RoutingRecord, _: LayerLoss) -> None:
        records.append(record)

    total = sum(len(ids) for texts in sequences.values() for ids in texts)
    gated = facts.has_gate and facts.shared_input_space
    measures = Measures(facts, gated)
    writer = TraceWriter(
        folder,
        model_type=config.model_type,
        checkpoint=checkpoint,
        layers=facts.moe_layers,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        hidden_size=config.get_text_config().hidden_size,
        groups=family_in(model).groups(config.get_text_config()),
        domains=tuple(sequences),
        embedding_share=min(1.0, EMBEDDINGS / max(total, 1)),
    )
    with writer, observed(model, keep, NEEDS, perturbation=perturbation):
        sequence = 0
        for domain, texts in sequences.items():
            for ids_BT in equal_lengths(texts):
                records.clear()
                ids = torch.from_numpy(ids_BT.astype(np.int64)).to(device)
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                for record in records:
                    measures.add(record)
                measures.check()
                _append(writer, records, ids_BT, sequence, domain, probabilities, norms)
                sequence += len(ids_BT)
    return measures


def equal_lengths(texts: Sequence[np.ndarray], most: int = AT_ONCE) -> Iterator[np.ndarray]:
    """Stack runs of sequences of one length, of at most ``most`` tokens together (or one)."""
    batch: list[np.ndarray] = []
    for ids_T in texts:
        if batch and (len(ids_T) != len(batch[0]) or (len(batch) + 1) * len(ids_T) > most):
            yield np.stack(batch)
            batch = []
        batch.append(ids_T)
    if batch:
        yield np.stack(batch)


def _append(
    writer: TraceWriter,
    records: list[RoutingRecord],
    ids_BT: np.ndarray,
    sequence: int,
    domain: str,
    probabilities: bool,
    norms: bool,
) -> None:
    ids_T = ids_BT.reshape(-1)
    positions_N = writer.sample(len(ids_T))
    at = torch.from_numpy(positions_N).to(records[0].index_TK.device)

    def stacked(tensors: list[Tensor]) -> np.ndarray:
        return torch.stack([t.to(tensors[0].device) for t in tensors], 1).cpu().numpy()

    writer.append(
        stacked([r.index_TK for r in records]),
        stacked([r.weights_TK.float() for r in records]),
        np.repeat(np.arange(sequence, sequence + len(ids_BT)), ids_BT.shape[1]),
        domain,
        probs_TLE=stacked([r.probs_TE for r in records]) if probabilities else None,
        norms_TLK=stacked([_norms(r) for r in records]) if norms else None,
        token_ids_T=ids_T,
        positions_N=positions_N,
        embeddings_NLH=stacked([r.inputs_TH[at.to(r.inputs_TH.device)].float() for r in records]),
    )


def _norms(record: RoutingRecord) -> Tensor:
    """L2 length (T, K) of each selected expert's output."""
    assert record.outputs_gram_TKK is not None
    return record.outputs_gram_TKK.float().diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
