"""Check by losses that ready-made experts are in the order of their clusters.

Shape legend: N experts, and N clusters.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import CheckpointError
from moe_finetune.upcycle.texts import Texts

log = logging.getLogger(__name__)

TEXTS, LENGTH = 16, 256
"""Number of training texts scored per cluster, and of their first tokens."""
CLEAR = 1e-3
"""Nats per token; a smaller mean difference between two orders is not conclusive."""


def check_pairing(
    folders: Sequence[Path], texts: Texts, clusters_C: np.ndarray, dtype: str
) -> None:
    """Compare the experts' order with the order of least loss on the clusters' training texts.

    Raises:
        CheckpointError: another order has a clearly smaller loss.
    """
    from scipy.optimize import linear_sum_assignment

    losses_NN = cluster_losses(folders, texts, clusters_C, dtype)
    _, cluster_N = linear_sum_assignment(losses_NN)
    experts = len(folders)
    excess = float(np.trace(losses_NN) - losses_NN[np.arange(experts), cluster_N].sum()) / experts
    if excess > CLEAR:
        order = [str(folders[expert]) for expert in np.argsort(cluster_N)]
        raise CheckpointError(
            "experts.checkpoints: expert n must belong to cluster n. On the clusters' training "
            f"texts another order has a loss that is lower by {excess:.3g} nats a token: "
            f"{', '.join(order)}. Use this order, or the table that they were trained with"
        )
    if np.ptp(losses_NN - losses_NN.mean(0)) < CLEAR:
        log.warning(
            "experts.checkpoints: the experts' losses on each cluster differ by less than %g "
            "nats per token, so their order cannot be checked",
            CLEAR,
        )


def cluster_losses(
    folders: Sequence[Path], texts: Texts, clusters_C: np.ndarray, dtype: str
) -> np.ndarray:
    """Mean loss of each expert (row) on each cluster's training texts, nats per token, (N, N)."""
    import torch

    from moe_finetune.upcycle.dense import load_dense
    from moe_finetune.upcycle.measure import accelerator, text_losses

    samples = []
    for cluster in range(len(folders)):
        categories = np.flatnonzero(clusters_C == cluster).tolist()
        per_category = -(-TEXTS // len(categories))
        samples.append(
            [w for c in categories for w in texts.windows("train", c, LENGTH, per_category)]
        )
    losses_NN = np.empty((len(folders), len(folders)))
    with torch.no_grad():
        for expert, folder in enumerate(folders):
            model: Any = load_dense(folder, dtype).to(accelerator())
            for cluster, windows in enumerate(samples):
                losses_NN[expert, cluster] = np.mean([text_losses(model, [w]) for w in windows])
    return losses_NN
