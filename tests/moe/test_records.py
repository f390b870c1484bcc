"""Scores of a record, and their logarithms, which must not end at the smallest float."""

import pytest
import torch

from moe_finetune.losses.record import log_scores, scores_of


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_logarithms_are_those_of_the_scores(score):
    logits_TE = torch.randn(5, 7, generator=torch.Generator().manual_seed(3)) * 9.0
    scores_TE = scores_of(logits_TE.double(), score)
    wanted = scores_TE / scores_TE.sum(-1, keepdim=True)
    found = log_scores(logits_TE, score).softmax(-1)
    assert torch.allclose(found.double(), wanted, rtol=2e-5, atol=1e-12)


def test_the_root_of_a_softplus_is_far_below_the_smallest_float():
    """Where softplus itself is 0 the logarithm and its gradient still are those of e^(x/2)."""
    logits_TE = torch.tensor([[-150.0, -151.0, -149.5], [-15.999, -16.001, 4.0]])
    leaf = logits_TE.clone().requires_grad_()
    found = log_scores(leaf, "sqrtsoftplus")
    exact = torch.nn.functional.softplus(logits_TE.double()).log() / 2
    assert torch.allclose(found.double(), exact, rtol=1e-6)
    found.sum().backward()
    assert torch.allclose(leaf.grad[0], torch.full((3,), 0.5), rtol=1e-5)
    assert torch.allclose(leaf.grad[1, :2], torch.full((2,), 0.5), rtol=1e-5)
