"""Sums and what follows from them, against plain loops over tokens."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_finetune.errors import NumericsError
from moe_finetune.losses.functional import coupling_loss, erc_loss
from moe_finetune.losses.gram import gram
from moe_finetune.metrics import mutual_coherence, score_variance
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.routing.measures_of_model import (
    Measures,
    least_alpha,
    router_geometry,
    router_values,
)
from moe_finetune.routing.sums import CHOICES, NEEDS, SCORES, Sums, largest_cosine, squared_cosine
from tests.support import tiny

E, H, D, K = 5, 7, 3, 2


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).double() for size in ((E, H), (E, D, H))]


def cosine(x, y):
    return float(x @ y / (x.norm() * y.norm()))


def test_cosine_and_noise_of_a_router(weights):
    router, _ = weights
    pairs = [(i, j) for i in range(E) for j in range(E) if i != j]
    angle = np.mean([abs(cosine(router[i], router[j])) for i, j in pairs])
    width = np.mean([
        min((router[i] - router[j]).norm() for j in range(E) if j != i) / (2 * router[i].norm())
        for i in range(E)
    ])  # fmt: skip
    assert router_geometry(router).tolist() == pytest.approx([angle, width], rel=1e-5)
    assert router_geometry(3 * torch.eye(4)).tolist() == pytest.approx([0, math.sqrt(2) / 2])
    same = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [1.0, 2.0], [-1.0, -2.0]])
    assert router_geometry(same).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def record(router, gate):
    factors = SimpleNamespace(of=lambda experts: gate[experts])
    return SimpleNamespace(router_weight_EH=router, expert_factors=lambda name: factors)


def test_erc_against_loop(weights):
    router, gate = weights
    norms = [[float((gate[j] @ router[i]).norm()) for j in range(E)] for i in range(E)]
    found = router_values(record(router, gate))
    for alpha, name in ((1, "erc_loss"), (2, "erc_loss_alpha_2"), (5, "erc_loss_alpha_5")):
        total = 0.0
        for i in range(E):
            for j in range(E):
                if i != j:
                    own = alpha * norms[i][i]
                    total += max(norms[i][j] - own, 0) + max(norms[j][i] - own, 0)
        assert found[name] == pytest.approx(total / E**2, rel=1e-5)
        assert found[name] == pytest.approx(float(erc_loss(router, gate, alpha, noise=False)))
    least = found["erc_least_alpha"]
    assert erc_loss(router, gate, 1.0001 * least, noise=False) == 0
    assert erc_loss(router, gate, 0.99 * least, noise=False) > 0
    sizes = [float(row.norm()) for row in gate]
    assert found["gate_norm_mean"] == pytest.approx(np.mean(sizes), rel=1e-5)
    assert found["router_norm_std"] == pytest.approx(np.std([r.norm() for r in router]), rel=1e-5)


def test_erc_of_perfect_and_absent_coupling():
    assert least_alpha(torch.eye(4)) == 0.0
    assert least_alpha(torch.eye(4).flip(0)) == math.inf


def test_a_router_row_of_zeros_has_no_noise():
    router, gate = torch.randn(5, 7), torch.randn(5, 3, 7)
    router[2] = 0
    values = router_values(record(router, gate))
    assert math.isfinite(values["noise_level"]) and values["router_norm_std"] > 0


def test_cosines_against_loop():
    vectors = torch.randn(13, 3, 8, generator=torch.Generator().manual_seed(6)).double()
    vectors[2, 1] = 0
    found, largest = squared_cosine(gram(vectors)), largest_cosine(gram(vectors))
    for token in range(13):
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        zero = {1} if token == 2 else set()
        values = [0.0 if zero & {a, b} else cosine(vectors[token, a], vectors[token, b]) ** 2
                  for a, b in pairs]  # fmt: skip
        assert found[token].item() == pytest.approx(np.mean(values), rel=1e-9)
        assert largest[token].item() == pytest.approx(mutual_coherence(vectors[token]))
    assert squared_cosine(gram(torch.eye(4)[None])).item() == 0.0
    assert squared_cosine(gram(torch.tensor([[[1.0, 2.0], [-2.0, -4.0]]]))).item() == pytest.approx(
        1
    )
    assert squared_cosine(gram(torch.ones(3, 1, 5))).tolist() == [0.0] * 3


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_groups_and_coupling_of_a_forward(family):
    """Of the tokens that count, by group; coupling is the loss of the two layers."""
    model = tiny.model(family).eval()
    facts, seen = model_facts(model), []
    ids = torch.randint(4, 260, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    measures = Measures(facts, groups=3)
    group_T = torch.arange(3).repeat_interleave(20)

    def keep(record, _):
        seen.append(record)
        measures.add(record, group_T)

    with torch.no_grad(), Recorder(model, observers=[keep], needs=NEEDS, observe="all"):
        model(input_ids=ids, attention_mask=mask)
    sums, top_k = measures.sums, facts.top_k
    assert sums.column(sums.array(), "tokens").tolist() == [[n] * len(seen) for n in (20, 13, 20)]
    load_GLE = sums.column(sums.array(), "load")
    found = measures.per_layer()
    for row, held in enumerate(seen):
        for group in range(3):
            chosen = held.index_TK[(group_T == group) & held.mask_T].ravel()
            wanted = torch.bincount(chosen, minlength=facts.num_experts)
            assert load_GLE[group, row].tolist() == wanted.tolist()
        scores = held.scores_TE[held.mask_T]
        assert found["score_variance"][row] == pytest.approx(score_variance(scores), rel=1e-6)
    for row, (lower, upper) in enumerate(pairwise(seen), 1):
        loss = coupling_loss(
            lower.distribution_TE, lower.index_TK, upper.distribution_TE, top_k, upper.mask_T
        )
        assert found["coupling_mass"][row] == pytest.approx(-loss.item(), rel=1e-6)
    assert found["coupling_mass"][0] is None
    twice = sums.weighted(np.array([[2.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    alone = sums.metrics(sums.array()[0])
    for name, values in alone.items():
        np.testing.assert_allclose(twice[name][0], values, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(twice[name][1], sums.metrics()[name], rtol=1e-12, atol=1e-12)


def information(scores_TE):
    scores_TE = torch.tensor(scores_TE, dtype=torch.float64)
    sums = Sums([0], scores_TE.shape[1], (*CHOICES, *SCORES))
    scores_TK, index_TK = scores_TE.topk(2)
    values = {"square": scores_TK.square().sum(-1),
              "score_entropy": torch.special.entr(scores_TK).sum(-1)}  # fmt: skip
    sums.add_values(0, index_TK, scores_TK, values)
    return {name: value.item() for name, value in sums.metrics().items()}


def test_information_by_hand():
    found = information([[0.5, 0.5, 0, 0], [0, 0, 1.0, 0]])
    mean = [0.25, 0.25, 0.5]
    entropy = -sum(p * math.log(p) for p in mean)
    assert found["expert_entropy"] == pytest.approx(entropy)
    assert found["score_entropy"] == pytest.approx(math.log(2) / 2)
    assert found["mutual_information"] == pytest.approx(entropy - math.log(2) / 2)
    assert found["collision_entropy"] == pytest.approx(-math.log(sum(p * p for p in mean)))
    assert information(np.eye(6).tolist())["mutual_information"] == pytest.approx(math.log(6))


def test_a_layer_without_a_number_is_named():
    model = tiny.model("olmoe").eval()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[4] = math.nan
    measures = Measures(model_facts(model))
    keep = lambda record, _: measures.add(record)  # noqa: E731
    with torch.no_grad(), Recorder(model, observers=[keep], needs=NEEDS, observe="all"):
        model(input_ids=torch.arange(4, 15)[None])
    with pytest.raises(NumericsError, match="layer 1: the model computes NaN"):
        measures.per_layer()
