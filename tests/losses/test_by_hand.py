"""Losses worked by hand, at the ends of float32, and what a term reads of a record."""

import math

import pytest
import torch
from pydantic import ValidationError

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import (
    dpp_loss,
    ncl_loss,
    orthogonality_loss,
    router_orthogonality_loss,
    router_z_loss,
    specialization_loss,
    variance_loss,
)
from tests.losses import reference
from tests.losses.cases import make, mask, record

BY_HAND = [
    # Unit vectors with cosine 3/5: det = (1 + eps)² - 9/25.
    (dpp_loss, [[[2.0, 0.0], [0.3, 0.4]]], {"eps": 0.2}, -math.log(1.44 - 0.36)),
    (dpp_loss, [[[2.0, 0.0], [0.3, 0.4]]], {}, -math.log(1.0001**2 - 0.36)),
    # y = (3, 0), (0, 5): mean (1.5, 2.5), each d has squared length 8.5; mean norm 4.
    (ncl_loss, [[[3.0, 0.0], [0.0, 5.0]]], {"normalize": False}, -17.0),
    (ncl_loss, [[[3.0, 0.0], [0.0, 5.0]]], {}, -17.0 / 16),
    # y_0 = (3, 0), y_1 = (4, 4): proj of y_0 on y_1 has squared length 144/32, back 144/9.
    (orthogonality_loss, [[[3.0, 0.0], [4.0, 4.0]]], {}, 4.5 + 16),
    (orthogonality_loss, [[[3.0, 0.0], [4.0, 4.0]]], {"form": "cosine"}, 1.0),
    (orthogonality_loss, [[[3.0, 0.0], [4.0, 4.0]]], {"eps": 1.0},
     144 * 32 / 33**2 + 144 * 9 / 10**2),
    # cos² 1/2, 0 and 1/2 over three pairs: mean 1/3.
    (router_orthogonality_loss, [[1.0, 0.0], [3.0, 3.0], [0.0, 2.0]], {}, 1 / 3),
    (router_orthogonality_loss, [[1.0, 0.0]], {}, 0.0),
    # cos² of (1,0)-(1,1) is 1/2, of (1,0)-(0,2) 0, of (1,1)-(0,2) 1/2; each pair counts twice.
    (specialization_loss, [[[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]], {}, 2.0),
    # Means (1/2, 1/4, 1/4). Token 0: (1/4 + 1/16 + 1/16)/3; token 1 the same.
    (variance_loss, [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], {}, -0.125),
    # logsumexp of (0, 0) is log 2; of (log 3, 0) it is log 4.
    (router_z_loss, [[0.0, 0.0], [math.log(3), 0.0]], {},
     (math.log(2) ** 2 + math.log(4) ** 2) / 2),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "values", "options", "value"), BY_HAND)
def test_worked_by_hand(loss, values, options, value):
    found = loss(torch.tensor(values, dtype=torch.float64), **options)
    assert found.item() == pytest.approx(value)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", ["variance", "z_loss", "router_orthogonality"])
def test_what_a_term_reads(name, score):
    """Scores after top-k, logits before the score, the router."""
    values, keep = make(), mask(17)
    probs = values["logits_TE"].softmax(-1) if score == "softmax" else values["logits_TE"].sigmoid()
    scores = torch.zeros_like(probs)
    for t, selected in enumerate(values["index_TK"].tolist()):
        for e in selected:
            scores[t, e] = probs[t, e] / probs[t, selected].sum()
    kind = TERMS[name]
    got = kind(kind.Options(weight=1.0)).loss(record(values, score, keep), LayerContext())
    wanted = {
        "variance": reference.variance(scores, keep),
        "z_loss": reference.z_loss(values["logits_TE"], keep),
        "router_orthogonality": reference.router_orthogonality(values["router_weight_EH"]),
    }
    torch.testing.assert_close(got, wanted[name])


def test_the_raw_form_of_ncl_warns():
    kind = TERMS["ncl"]
    with pytest.warns(UserWarning, match="unbounded below"):
        term = kind(kind.Options(weight=1.0, normalize=False))
    values = make()
    got = term.loss(record(values), LayerContext())
    torch.testing.assert_close(got, reference.ncl(values["outputs_TKH"], None, False))


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[200.0, -300.0, 100.0]], requires_grad=True)
    loss = router_z_loss(logits)
    assert loss.item() == pytest.approx(40000.0)
    assert torch.autograd.grad(loss, logits)[0][0].tolist() == pytest.approx([400.0, 0.0, 0.0])


@pytest.mark.parametrize("scale", [1e-10, 1e-5, 1e8])
def test_float32_holds_over_many_scales(scale):
    activations = make()["activations_TKD"]
    small = (activations.float() * scale).requires_grad_()
    loss = specialization_loss(small)
    assert loss.item() == pytest.approx(specialization_loss(activations).item(), rel=1e-4)
    assert torch.autograd.grad(loss, small)[0].isfinite().all()


def test_large_outputs_stay_finite_in_float32():
    outputs = torch.tensor([[[1e7, 0.0], [1e7, 1e7]]], requires_grad=True)
    loss = orthogonality_loss(outputs)
    assert loss.item() == pytest.approx(1.5e14)
    assert torch.autograd.grad(loss, outputs)[0].isfinite().all()


def test_threshold_is_strict_and_needs_both_scores():
    outputs = make(dtype=torch.float32)["outputs_TKH"][:1]
    for scores, left in [
        ((0.2, 0.3, 0.5), [1, 2]),
        ((0.2, 0.2, 0.6), []),
        ((0.5, 0.1, 0.4), [0, 2]),
    ]:
        value = orthogonality_loss(outputs, torch.tensor([scores]), tau_gate=0.2)
        torch.testing.assert_close(value, orthogonality_loss(outputs[:, left]))


def test_gradient_of_the_variance_is_the_deviation_without_the_papers_factor():
    """Eq. 9 of P0 has (N - 1) / N; deviations from a mean sum to 0, so there is none."""
    scores = make()["logits_TE"].softmax(-1).requires_grad_()
    tokens, experts = scores.shape
    (gradient,) = torch.autograd.grad(tokens * variance_loss(scores), scores)
    deviation = scores.detach() - scores.detach().mean(0)
    torch.testing.assert_close(gradient, -2 / experts * deviation)


def test_the_least_variance_has_one_expert_a_token_and_even_load():
    """-(1 - 1/E)/E; more with an uneven load, or with a token of two experts."""
    experts = 5
    even = torch.eye(experts, dtype=torch.float64).repeat(3, 1)
    least = variance_loss(even).item()
    assert least == pytest.approx(-(1 - 1 / experts) / experts)
    uneven, shared = even.clone(), even.clone()
    uneven[0], shared[0, :2] = even[1], 0.5
    assert variance_loss(uneven).item() > least and variance_loss(shared).item() > least


def test_equal_outputs_have_a_finite_determinant_in_float32():
    # Ĝ of K equal vectors has one eigenvalue K and K-1 zeros.
    outputs = torch.randn(1, 1, 9).expand(5, 4, 9).clone().requires_grad_()
    loss = dpp_loss(outputs)
    assert loss.item() == pytest.approx(-math.log(4.0001) - 3 * math.log(1e-4), rel=1e-3)
    assert torch.autograd.grad(loss, outputs)[0].isfinite().all()


def test_eight_outputs_equal_torchs_determinant():
    outputs = torch.randn(3, 8, 11, dtype=torch.float64)
    unit = torch.nn.functional.normalize(outputs, dim=-1)
    kernel = unit @ unit.mT + 1e-4 * torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(dpp_loss(outputs), -kernel.logdet().mean())


def test_parallel_outputs_of_a_large_model_at_the_smallest_eps():
    torch.manual_seed(0)
    outputs = torch.randn(257, 1, 7168) * torch.rand(257, 6, 1).mul(5).exp()
    loss = dpp_loss(outputs, eps=1e-5).item()
    # An entry that is off by 1e-6 moves an eigenvalue of 1e-5 by a tenth.
    assert loss == pytest.approx(-math.log(6.0) - 5 * math.log(1e-5), abs=2.0)


def test_bad_options():
    angle, threshold = {"form": "angle"}, "tau_gate"
    for name, options in [("orthogonality", angle), ("orthogonality", {threshold: 1.0}),
                          ("orthogonality", {threshold: -0.1}), ("orthogonality", {"eps": 0.0}),
                          ("dpp", {"eps": 9e-6})]:  # fmt: skip
        with pytest.raises(ValidationError, match=next(iter(options))):
            TERMS[name].Options(weight=1.0, **options)
    outputs = make()["outputs_TKH"]
    with pytest.raises(ValueError, match="form is 'angle', expected one of projection, cosine"):
        orthogonality_loss(outputs, form="angle")
    with pytest.raises(ValueError, match=r"eps is 0\.0, expected a positive number"):
        dpp_loss(outputs, eps=0.0)
    parallel = torch.randn(3, 1, 7) * torch.rand(3, 4, 1)
    with pytest.raises(ValueError, match=r"eps is 1e-06, expected at least 1e-05"):
        dpp_loss(parallel, eps=1e-6)
    loss = dpp_loss(parallel.double(), eps=1e-6).item()
    # One direction: eigenvalues 4 + eps and three times eps.
    assert loss == pytest.approx(-math.log(4.0) - 3 * math.log(1e-6), rel=1e-4)
