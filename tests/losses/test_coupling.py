from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext, ModelFacts, PreviousLayer
from moe_finetune.losses.functional import coupling_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record
from tests.support.objectives import objective_of

TERM = TERMS["coupling"]


def term(**options):
    return TERM(TERM.Options(weight=1.0, **options))


def below(values, layer=1):
    return PreviousLayer(layer, values["probs_TE"], values["index_TK"])


def above(values, mask_T=None, layer=2, seed=11):
    """The next layer's record, with logits of its own."""
    return record({**values, "logits_TE": make(seed=seed)["logits_TE"]}, mask_T=mask_T, layer=layer)


def test_worked_by_hand():
    # A = {0, 2}: .5 + .3; the two best above: .6 + .3.
    probs = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    following = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64)
    loss = coupling_loss(probs, torch.tensor([[2, 0]]), following, 2)
    assert loss.item() == pytest.approx(-0.8 * 0.9)


def test_ties_may_be_broken_either_way():
    probs = torch.full((2, 4), 0.25)
    loss = coupling_loss(probs, torch.tensor([[0, 1], [2, 3]]), probs, 2)
    assert loss.item() == pytest.approx(-0.25)


def test_bad_top_k():
    values = make()
    for top_k in (0, 8):
        with pytest.raises(ValueError, match=f"top_k is {top_k}, expected 1 to E=7"):
            coupling_loss(values["probs_TE"], values["index_TK"], values["next_probs_TE"], top_k)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_term_joins_a_layer_with_the_one_below(score):
    values, keep = make(), mask(17)
    upper = replace(above(values, keep), score=score)
    got = term().loss(upper, LayerContext(previous=below(values)))
    probs = upper.logits_TE.softmax(-1)
    if score == "sigmoid":
        probs = upper.logits_TE.sigmoid()
        probs = probs / probs.sum(-1, keepdim=True)
    expected = reference.coupling(values["probs_TE"], values["index_TK"], probs, 3, keep)
    torch.testing.assert_close(got, expected)


def test_the_first_moe_layer_has_no_term():
    assert term().loss(record(make()), LayerContext()) is None
    assert term().needs == {"previous"}


def test_term_sends_gradients_to_both_layers():
    values = make()
    lower = values["logits_TE"].clone().requires_grad_()
    upper = above(values)
    logits = upper.logits_TE.clone().requires_grad_()
    previous = PreviousLayer(1, lower.softmax(-1), values["index_TK"])
    loss = term().loss(replace(upper, logits_TE=logits), LayerContext(previous))
    assert all(grad.norm() > 0 for grad in torch.autograd.grad(loss, (lower, logits)))


def test_a_model_without_a_pair_is_refused():
    facts = ModelFacts(moe_layers=(3,), num_experts=7, top_k=3, vocab_size=13)
    with pytest.raises(ObjectiveError, match="joins two MoE layers, but this model has 1"):
        term().check(facts)
    several = replace(facts, moe_layers=(3, 4, 5))
    with pytest.raises(ObjectiveError, match=r"layers: \[3\] contains only the first MoE layer"):
        term(layers=[3]).check(several)
    term(layers=["3-4"]).check(several)
    term().check(several)


def test_bad_options():
    with pytest.raises(ValidationError, match="pairing"):
        TERM.Options(weight=1.0, pairing="transition")


def test_the_mean_over_layers_is_the_mean_over_pairs():
    """Four MoE layers make three pairs."""
    facts = ModelFacts(moe_layers=(1, 2, 3, 4), num_experts=7, top_k=3, vocab_size=13)
    values = make()
    lower = PreviousLayer(3, values["next_probs_TE"], values["index_TK"])
    totals = []
    for reduction in ("sum", "mean"):
        options = {"coupling": {"weight": 0.6, "layers_reduction": reduction}}
        objective = objective_of(options, facts)
        totals.append(objective(record(values, layer=4), LayerContext(previous=lower)).total)
    torch.testing.assert_close(totals[1], totals[0] / 3)
    options["coupling"]["layers"] = [1, 2, 4]
    objective = objective_of(options, facts)
    two = objective(record(values, layer=4), LayerContext(previous=lower)).total
    torch.testing.assert_close(two, totals[0] / 2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shift", [0.0, -60.0, -200.0])
def test_distributions_sum_to_one_however_small_the_scores(score, shift):
    values = make()
    held = record({**values, "logits_TE": values["logits_TE"].float() + shift}, score=score)
    ones = torch.ones(17)
    torch.testing.assert_close(held.distribution_TE.sum(-1), ones)
    torch.testing.assert_close(held.scores_TK.sum(-1), ones)
    torch.testing.assert_close(held.scores_TE.sum(-1), ones)
    if shift == 0.0:
        scores = values["logits_TE"].float().sigmoid()
        wanted = scores if score == "sigmoid" else values["logits_TE"].float().exp()
        wanted = wanted / wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(held.distribution_TE, wanted)
