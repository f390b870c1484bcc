import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import variance_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record


def test_worked_by_hand():
    # Means (1/2, 1/4, 1/4). Token 0: (1/4 + 1/16 + 1/16)/3; token 1 the same.
    scores = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    assert variance_loss(scores).item() == pytest.approx(-0.125)


def test_gradient_is_the_deviation_without_the_papers_factor():
    """Eq. 9 of P0 has (N - 1) / N; deviations from a mean sum to 0, so there is none."""
    scores = make()["logits_TE"].softmax(-1).requires_grad_()
    tokens, experts = scores.shape
    (gradient,) = torch.autograd.grad(tokens * variance_loss(scores), scores)
    deviation = scores.detach() - scores.detach().mean(0)
    torch.testing.assert_close(gradient, -2 / experts * deviation)


def test_the_least_value_has_one_expert_a_token_and_even_load():
    """-(1 - 1/E)/E; more with an uneven load, or with a token of two experts."""
    experts = 5
    even = torch.eye(experts, dtype=torch.float64).repeat(3, 1)
    least = variance_loss(even).item()
    assert least == pytest.approx(-(1 - 1 / experts) / experts)
    uneven, shared = even.clone(), even.clone()
    uneven[0], shared[0, :2] = even[1], 0.5
    assert variance_loss(uneven).item() > least and variance_loss(shared).item() > least


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_term_reads_scores_after_topk(score):
    values, keep = make(), mask(17)
    probs = values["logits_TE"].softmax(-1) if score == "softmax" else values["logits_TE"].sigmoid()
    scores = torch.zeros_like(probs)
    for t, selected in enumerate(values["index_TK"].tolist()):
        for e in selected:
            scores[t, e] = probs[t, e] / probs[t, selected].sum()
    kind = TERMS["variance"]
    got = kind(kind.Options(weight=1.0)).loss(record(values, score, keep), LayerContext())
    torch.testing.assert_close(got, reference.variance(scores, keep))
