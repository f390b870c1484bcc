"""How far the policy's routing has moved from the reference's, for preference and RL stages.

Both route the same sample of the training rows: the model with its adapter, and with the adapter
switched off. Shape legend: T tokens, L MoE layers, E experts, K selected.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import in_mode
from moe_finetune.training.callback import SpecializationCallback
from moe_finetune.training.callback_order import add_callbacks
from moe_finetune.training.sample import observing
from moe_finetune.training.snapshot import Example, first_rows

log = logging.getLogger(__name__)
TOKENS = 1024


class RoutingDrift(TrainerCallback):
    """Adds ``routing/kl_from_reference`` and ``routing/changed_from_reference`` to each log.

    Args:
        callback: its recorder is on the model.
        examples: rows with ``input_ids``; their first 1,024 tokens are routed.
    """

    def __init__(self, callback: SpecializationCallback, examples: Iterable[Example]):
        self.callback = callback
        self.rows = [list(row["input_ids"]) for row in first_rows(examples, TOKENS)]

    def on_log(self, args, state, control, logs=None, **kwargs):
        specialization = self.callback.specialization
        if specialization is None or logs is None or "loss" not in logs:
            return
        values = routing_drift(specialization.recorder, self.rows)
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)


def watch_drift(
    trainer: Any, callback: SpecializationCallback, examples: Iterable[Example]
) -> None:
    """Log the drift of ``trainer``'s policy, or that there is no reference to compare with."""
    if not hasattr(trainer.model, "disable_adapter"):
        log.warning(
            "routing/kl_from_reference is not logged: without an adapter to disable, there is "
            "no reference in memory"
        )
        return
    add_callbacks(trainer, RoutingDrift(callback, examples))


def routing_drift(recorder: Recorder, rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compare the routing of an adapted model with that of its base, on the same tokens.

    Args:
        recorder: installed on a PEFT model; with a sharded model every rank must call this.
        rows: token ids, one sequence per row.

    Returns:
        ``routing/kl_from_reference``: mean over tokens and layers of ``KL(policy || reference)``
        of the routers' distributions over all experts, in nats. ``routing/changed_from_reference``:
            share of (token, layer) pairs whose sets of selected experts differ.
    """
    model: Any = recorder.model
    policy = _routing(recorder, rows)
    with model.disable_adapter():
        reference = _routing(recorder, rows)
    divergence, changed = [], []
    for (p_TE, policy_TK), (q_TE, reference_TK) in zip(policy, reference, strict=True):
        tiny = torch.finfo(p_TE.dtype).tiny
        logs_TE = p_TE.clamp_min(tiny).log() - q_TE.clamp_min(tiny).log()
        divergence.append((p_TE * logs_TE).sum(-1))
        same_TK = policy_TK.sort(-1).values == reference_TK.sort(-1).values
        changed.append(~same_TK.all(-1))
    return {
        "routing/kl_from_reference": float(torch.cat(divergence).mean()),
        "routing/changed_from_reference": float(torch.cat(changed).double().mean()),
    }


def _routing(recorder: Recorder, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """Distribution ``(T, E)`` and selection ``(T, K)`` of each layer, row after row."""
    model: Any = recorder.model
    selections: list[tuple[Tensor, Tensor]] = []

    def keep(record: RoutingRecord, _: LayerLoss) -> None:
        selections.append((record.distribution_TE.double(), record.index_TK))

    device = next(model.parameters()).device
    with in_mode(model, train=False), torch.no_grad(), observing(recorder, keep):
        for row in rows:
            ids = torch.tensor([row], device=device)
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return selections
