"""Run a model over sequences and write its routing as a trace, with sums that a trace lacks.

Shape legend: B sequences, T tokens, L MoE layers, E experts, K selected, H hidden, N sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.metrics import coherence_barrier, gram_cosine, noise_level, router_cosine
from moe_finetune.metrics.arrays import from_layer
from moe_finetune.metrics.coherence import gram_coherence
from moe_finetune.metrics.projections import gate_experts
from moe_finetune.metrics.router import erc_of_norms
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import causal_lm, in_mode, model_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.routing.trace import TraceWriter

EMBEDDINGS = 4000
GATES_AT_ONCE = 8
AT_ONCE = 8192
NEEDS = frozenset({"activations_gram", "outputs_gram"})


class Measures:
    """Sums over the tokens of what a trace does not store, per MoE layer."""

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int, gated: bool = True):
        count = len(layers)
        self.top_k, self.tokens, self.gated = top_k, 0, gated
        self.probability_LE = np.zeros((count, num_experts))
        self.entropy_L = np.zeros(count)
        self.cosines_L = {"activation_cosine": np.zeros(count), "output_cosine": np.zeros(count)}
        self.coherence_L, self.below_L = np.zeros(count), np.zeros(count)
        self.router_L: dict[str, np.ndarray] = {}
        self.middle = count // 2
        self.gate_rows_EDH: np.ndarray | None = None

    def add(self, place: int, record: RoutingRecord) -> None:
        distribution_TE = record.distribution_TE.double()
        self.probability_LE[place] += distribution_TE.sum(0).cpu().numpy()
        self.entropy_L[place] += torch.special.entr(distribution_TE).sum().item()
        if not self.tokens:
            for name, value in router_values(record, self.gated).items():
                self.router_L.setdefault(name, np.full(len(self.entropy_L), np.nan))[place] = value
        if self.gated and place == self.middle and self.gate_rows_EDH is None:
            assert record.expert_factors is not None
            gate_EDH = record.expert_factors("gate").of(gate_experts(self.probability_LE.shape[1]))
            self.gate_rows_EDH = gate_EDH.cpu().numpy()
        if self.top_k == 1:
            return
        assert record.activations_gram_TKK is not None and record.outputs_gram_TKK is not None
        tokens = len(record.index_TK)
        outputs_TKK = record.outputs_gram_TKK.double().cpu().numpy()
        activations_TKK = record.activations_gram_TKK.double().cpu().numpy()
        self.cosines_L["activation_cosine"][place] += tokens * gram_cosine(activations_TKK)
        self.cosines_L["output_cosine"][place] += tokens * gram_cosine(outputs_TKK)
        coherence_T = gram_coherence(outputs_TKK)
        self.coherence_L[place] += coherence_T.sum()
        self.below_L[place] += (coherence_T < coherence_barrier(self.top_k)).sum()

    def per_layer(self) -> dict[str, list[float | None]]:
        """Metrics by name, a list over layers each; None where one does not exist in a layer."""
        mean_LE = self.probability_LE / self.tokens
        found = {
            "entropy": self.entropy_L / self.tokens,
            "routing_variance": ((mean_LE - 1 / mean_LE.shape[1]) ** 2).mean(1),
        } | self.router_L
        if self.top_k > 1:
            found |= {name: sums_L / self.tokens for name, sums_L in self.cosines_L.items()}
        return {
            name: [value if np.isfinite(value) else None for value in values_L.tolist()]
            for name, values_L in found.items()
            if np.isfinite(values_L).any()
        }

    def coherence(self) -> dict[str, Any] | None:
        """Mutual coherence of the selected experts' outputs, as the report reads it."""
        if self.top_k == 1:
            return None
        rows = zip(self.coherence_L / self.tokens, self.below_L / self.tokens, strict=True)
        return {
            "barrier": coherence_barrier(self.top_k),
            "per_layer": [{"mean": float(m), "share_below": float(s)} for m, s in rows],
        }


def router_values(record: RoutingRecord, gated: bool = True) -> dict[str, float]:
    """What router and gates of one layer say without a token: cosine, norms, ERC (P2 Tables 2, 3).

    ``erc_loss`` is at alpha 1, ``erc_loss_alpha_2`` to ``_5`` are at those.

    The gates are gone through a few experts at a time: all of a layer's are as large as the layer.
    Where experts have none that reads what the router reads, the router's values are all; where
    they rank themselves, there is no value.
    """
    if record.router_weight_EH is None:
        return {}
    router_EH = record.router_weight_EH.float()
    rows_E = router_EH.norm(dim=-1).cpu().numpy()
    of_router = {
        "router_cosine": router_cosine(router_EH.cpu()),
        "noise_level": noise_level(router_EH.cpu()) if rows_E.all() else float("nan"),
        "router_norm_mean": float(rows_E.mean()),
        "router_norm_std": float(rows_E.std()),
    }
    if not gated:
        return of_router
    assert record.expert_factors is not None
    factors, experts = record.expert_factors("gate"), len(router_EH)
    norms_EE, gates_E = np.zeros((experts, experts)), np.zeros(experts)
    for first in range(0, experts, GATES_AT_ONCE):
        chosen = range(first, min(first + GATES_AT_ONCE, experts))
        for expert, gate_DH in zip(chosen, factors.of(list(chosen)).float(), strict=True):
            norms_EE[:, expert] = (router_EH @ gate_DH.T).norm(dim=-1).cpu().numpy()
            gates_E[expert] = gate_DH.norm().item()
    table = erc_of_norms(norms_EE)
    return of_router | {
        "erc_loss": table["loss"][1.0],
        **{f"erc_loss_alpha_{a:g}": loss for a, loss in table["loss"].items() if a != 1},
        "erc_least_alpha": table["least_alpha"],
        "gate_norm_mean": float(gates_E.mean()),
        "gate_norm_std": float(gates_E.std()),
    }


def trace_model(
    model: Any,
    sequences: Mapping[str, Sequence[np.ndarray]],
    folder: Path,
    *,
    checkpoint: str,
    probabilities: bool = False,
    perturbation: Perturbation | None = None,
    seed: int = 0,
) -> Measures:
    """Write the routing of ``sequences`` (token ids by domain) to ``folder``.

    Neighbours of equal length share a forward; nothing is padded. Embeddings of about 4,000 tokens
    are sampled. The model is left in the mode it was in.

    Args:
        model: a transformers causal language model or a PEFT model around one.
        sequences: domain -> arrays of token ids, each a sequence of its own.
        folder: new or empty; the trace's folder.
        checkpoint: what the trace says it was recorded from.
        probabilities: store the probabilities of all experts too.
        perturbation: a change to routing that belongs to the model, such as a loss-free bias.
        seed: of the sample.
    """
    config: Any = causal_lm(model).config
    facts = model_facts(model)
    device = next(model.parameters()).device
    records: list[RoutingRecord] = []

    def keep(record: RoutingRecord, _: LayerLoss) -> None:
        records.append(record)

    total = sum(len(ids) for texts in sequences.values() for ids in texts)
    gated = facts.has_gate and facts.one_space
    measures = Measures(facts.moe_layers, facts.num_experts, facts.top_k, gated)
    writer = TraceWriter(
        folder,
        model_type=config.model_type,
        checkpoint=checkpoint,
        layers=facts.moe_layers,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        hidden_size=config.get_text_config().hidden_size,
        domains=tuple(sequences),
        embedding_share=min(1.0, EMBEDDINGS / max(total, 1)),
        seed=seed,
    )
    recorder = Recorder(
        model, observers=[keep], needs=NEEDS, observe="all", perturbation=perturbation
    )
    with in_mode(model, train=False), torch.no_grad(), writer, recorder:
        number = 0
        for domain, texts in sequences.items():
            for ids_BT in equal_lengths(texts):
                records.clear()
                ids = torch.from_numpy(ids_BT.astype(np.int64)).to(device)
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                for place, record in enumerate(records):
                    with from_layer(record.layer):
                        measures.add(place, record)
                measures.tokens += ids_BT.size
                _append(writer, records, ids_BT, number, domain, probabilities)
                number += len(ids_BT)
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
    number: int,
    domain: str,
    probabilities: bool,
) -> None:
    ids_T = ids_BT.reshape(-1)
    positions_N = writer.sample(len(ids_T))
    at = torch.from_numpy(positions_N).to(records[0].index_TK.device)

    def stacked(tensors: list[Tensor]) -> np.ndarray:
        return torch.stack([t.to(tensors[0].device) for t in tensors], 1).cpu().numpy()

    writer.append(
        stacked([r.index_TK for r in records]),
        stacked([r.weights_TK.float() for r in records]),
        np.repeat(np.arange(number, number + len(ids_BT)), ids_BT.shape[1]),
        domain,
        probs_TLE=stacked([r.probs_TE for r in records]) if probabilities else None,
        token_ids_T=ids_T,
        positions_N=positions_N,
        embeddings_NLH=stacked([r.inputs_TH[at.to(r.inputs_TH.device)].float() for r in records]),
    )
