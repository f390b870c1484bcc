"""P4 Figure 3: diverse experts on a synthetic classification task, in ten folds.

Shape legend: M models (one per fold), N samples, T samples of a batch or of a fold's test part, F
features, E experts, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.effects.p4_models import Routed, StackedMixtures, training_loss
from eval.effects.pictures import new_figure, save
from moe_finetune.metrics.coherence import effective_rank
from moe_finetune.metrics.domains import domain_information


@dataclass(frozen=True)
class Setting:
    """Sizes and schedule of the paper's experiment (P4 section 6 and appendix L).

    Attributes:
        redundant: features that are random mixtures of the informative ones (appendix L: 90).
        clusters: clusters per class; the default 1 is ours, because the paper does not specify it.
        alpha: weight of the balance loss, in all arms.
        weight: weight of the arm's loss (the paper's lambda).
        determinantal_eps: eps of theorem 6.3's choice at evaluation; the value is ours, see
            :mod:`eval.effects.determinantal`.
    """

    samples: int = 4000
    informative: int = 10
    redundant: int = 90
    classes: int = 10
    clusters: int = 1
    separation: float = 0.6
    data_seed: int = 42
    experts: int = 16
    hidden: int = 32
    top_k: int = 2
    batch: int = 128
    learning_rate: float = 1e-3
    epochs: int = 30
    alpha: float = 0.01
    weight: float = 0.1
    folds: int = 10
    determinantal_eps: float = 1e-4


CURVES = ("accuracy", "effective_rank", "pair_cosine")

HEAT_MAPS = {"cosines": "|cos| of two experts", "class_shares": "expert x class"}
TITLES = {"baseline": "Baseline", "orthogonality": "L_o", "dpp": "DPP", "ncl": "NCL"}


def make_data(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """``(inputs_NF float32, labels_N int64)``, the same for every seed."""
    from sklearn.datasets import make_classification

    inputs_NF, labels_N = make_classification(
        setting.samples, setting.informative + setting.redundant,
        n_informative=setting.informative, n_redundant=setting.redundant,
        n_classes=setting.classes, n_clusters_per_class=setting.clusters,
        class_sep=setting.separation, random_state=setting.data_seed,
    )  # fmt: skip
    return inputs_NF.astype(np.float32), labels_N.astype(np.int64)


def fold_rows(labels_N: np.ndarray, folds: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """``(train_MN, test_MT)`` row numbers of the stratified folds.

    Raises:
        ValueError: the folds differ in size and cannot be stacked.
    """
    from sklearn.model_selection import StratifiedKFold

    splits = StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels_N, labels_N)
    train, test = zip(*splits, strict=True)
    if len({len(rows) for rows in test}) > 1:
        raise ValueError(f"{len(labels_N)} samples do not make {folds} folds of equal size")
    return np.stack(train), np.stack(test)


def run(settings: dict[str, Any], options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train and test one arm in all folds; arms of one seed share folds, weights and batches.

    ``settings`` are changes to :class:`Setting`; ``options`` has the ``loss`` of the arm. Returns
    per fold ``accuracy``, ``effective_rank`` (of all experts' outputs on the test part,
    rows experts, at most E; the paper defines none), ``pair_cosine`` (mean absolute cosine of two
    experts' outputs), ``class_information`` (mutual information of selected expert and class, in
    nats) and ``determinantal_gain`` (accuracy with theorem 6.3's choice of experts minus that with
    top-k); under ``curves`` the first three before training and after every epoch, ``(epochs + 1,
    folds)``; and of the first fold the heat maps ``cosines`` ``(E, E)`` and ``class_shares`` ``(E,
    C)``: the share of a class's selections that goes to each expert.
    """
    setting = Setting(**settings)
    inputs_NF, labels_N = (torch.from_numpy(array) for array in make_data(setting))
    train_MN, test_MT = (
        torch.from_numpy(rows) for rows in fold_rows(labels_N.numpy(), setting.folds, seed)
    )
    generator = torch.Generator().manual_seed(seed)
    model = StackedMixtures(
        setting.folds, inputs_NF.shape[1], setting.classes, setting.experts, setting.hidden,
        setting.top_k, generator,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)

    def tested() -> dict[str, Any]:
        with torch.no_grad():
            return measure(model(inputs_NF[test_MT]), labels_N[test_MT])

    probes = [tested()]
    for _ in range(setting.epochs):
        order_MN = torch.rand(train_MN.shape, generator=generator).argsort(1)
        for rows_MT in train_MN.gather(1, order_MN).split(setting.batch, dim=1):
            routed = model(inputs_NF[rows_MT])
            loss = training_loss(
                routed, labels_N[rows_MT], options["loss"], setting.alpha, setting.weight
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        probes.append(tested())
    with torch.no_grad():
        chosen = model(inputs_NF[test_MT], setting.determinantal_eps)
        hits_M = (chosen.logits_MTC.argmax(-1) == labels_N[test_MT]).float().mean(1)
    ranks = [float(np.mean(probe["effective_rank"])) for probe in (probes[0], probes[-1])]
    return {
        **probes[-1],
        "determinantal_gain": (hits_M.numpy() - probes[-1]["accuracy"]).tolist(),
        "effective_rank_change": ranks[1] - ranks[0],
        "curves": {name: [at[name] for at in probes] for name in CURVES},
    }


def measure(routed: Routed, labels_MT: torch.Tensor) -> dict[str, Any]:
    """Accuracy, effective rank and heat maps of every fold's model on its test part."""
    hits_M = (routed.logits_MTC.argmax(-1) == labels_MT).float().mean(1)
    outputs_METC = routed.outputs_MTEC.detach().transpose(1, 2).double().numpy()
    cosines_MEE = np.stack([pair_cosines(outputs_ETC) for outputs_ETC in outputs_METC])
    experts, classes = cosines_MEE.shape[1], routed.logits_MTC.shape[-1]
    counts_MEC = np.zeros((len(outputs_METC), experts, classes))
    for m, (index_TK, labels_T) in enumerate(zip(routed.index_MTK, labels_MT, strict=True)):
        np.add.at(counts_MEC[m], (index_TK.numpy(), labels_T.numpy()[:, None]), 1)
    return {
        "accuracy": hits_M.tolist(),
        "effective_rank": [effective_rank(o.reshape(experts, -1)) for o in outputs_METC],
        "pair_cosine": (cosines_MEE.sum((1, 2)) / (experts * (experts - 1))).tolist(),
        "class_information": [
            domain_information(counts_EC[:, counts_EC.any(0)].T)["mutual_information"]
            for counts_EC in counts_MEC
        ],
        # Folds do not share an order of experts, so the pictures are of one fold.
        "cosines": cosines_MEE[0].round(5).tolist(),
        "class_shares": (counts_MEC[0] / np.maximum(counts_MEC[0].sum(0), 1)).round(5).tolist(),
    }


def pair_cosines(outputs_ETC: np.ndarray) -> np.ndarray:
    """``(E, E)`` mean over samples of ``abs cos`` of two experts' outputs; 0 on the diagonal."""
    lengths_ET1 = np.linalg.norm(outputs_ETC, axis=-1, keepdims=True)
    unit_TEC = (outputs_ETC / np.where(lengths_ET1 > 0, lengths_ET1, 1)).transpose(1, 0, 2)
    cosines_EE = np.abs(unit_TEC @ unit_TEC.transpose(0, 2, 1)).mean(0)
    np.fill_diagonal(cosines_EE, 0)
    return cosines_EE


def draw(arms: Mapping[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write ``figure3.png`` (the end of training) and ``figure3_epochs.png``.

    The first has effective rank and accuracy over folds, and heat maps of the first seed's first
    fold, whose experts are sorted by the class that selects them most.
    """
    names = [TITLES.get(arm, arm) for arm in arms]
    figure, flat = new_figure((3 * (len(arms) + 1), 5.6), 2, len(arms) + 1)
    grid = flat.reshape(2, -1)
    for axes, metric in zip(grid[:, 0], ("effective_rank", "accuracy"), strict=True):
        folds = [np.concatenate([result[metric] for result in runs]) for runs in arms.values()]
        axes.boxplot(folds, tick_labels=names)
        axes.set_title(f"{metric.replace('_', ' ')}, every fold", fontsize=9)
        axes.tick_params(labelsize=7)
    firsts = [runs[0] for runs in arms.values()]
    for row, (key, title) in zip(grid, HEAT_MAPS.items(), strict=True):
        largest = max(np.max(first[key]) for first in firsts)  # one scale for all arms
        for axes, first, name in zip(row[1:], firsts, names, strict=True):
            order_E = np.argsort(np.argmax(first["class_shares"], axis=1), kind="stable")
            values = np.array(first[key])[order_E]
            values = values[:, order_E] if key == "cosines" else values
            drawn = axes.imshow(values, vmin=0, vmax=largest, aspect="auto", cmap="viridis")
            axes.set_title(f"{name}: {title}", fontsize=8)
            axes.tick_params(labelsize=6)
            figure.colorbar(drawn, ax=axes, shrink=0.7).ax.tick_params(labelsize=6)
    save(figure, folder / "figure3.png")
    _draw_epochs(arms, folder / "figure3_epochs.png")


def _draw_epochs(arms: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Accuracy and effective rank over epochs, with one standard deviation of a seed's folds."""
    figure, grid = new_figure((9, 3.4), 1, 2)
    for axes, metric in zip(grid, ("accuracy", "effective_rank"), strict=True):
        for arm, runs in arms.items():
            values_SAM = np.array([run["curves"][metric] for run in runs])
            mean_A, spread_A = values_SAM.mean((0, 2)), values_SAM.var(2, ddof=1).mean(0) ** 0.5
            (line,) = axes.plot(mean_A, label=TITLES.get(arm, arm), linewidth=1.4)
            band = mean_A - spread_A, mean_A + spread_A
            axes.fill_between(range(len(mean_A)), *band, color=line.get_color(), alpha=0.15)
        axes.set(xlabel="epoch", title=metric.replace("_", " "))
        axes.legend(fontsize=8)
    save(figure, path)
