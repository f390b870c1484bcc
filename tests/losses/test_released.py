"""P0's losses as its authors' code computes them: forms, grouping, and weights found once."""

import math

import pytest
import torch

from moe_finetune.errors import ObjectiveError, RecipeError
from moe_finetune.losses.functional import softmax_variance_loss, span_orthogonality_loss
from moe_finetune.losses.released import grouped_by_expert, router_row_overlap
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import model_facts
from moe_finetune.recipe.method import resolve_method
from tests import tiny
from tests.losses import reference
from tests.losses.cases import make, mask, record
from tests.objectives import objective_of

TERMS = {"span_orthogonality": {"target": 1e-4}, "softmax_variance": {"target": 1e-3}}


def released_orthogonality(outputs_TKH):
    """The released code's loss on all groups at once, re-stated: sums, then one division."""
    tokens, chosen, _ = outputs_TKH.shape
    total = sum(
        reference.span_projection(rows[k], [*rows[:k], *rows[k + 1 :]])
        for rows in outputs_TKH
        for k in range(chosen)
    )
    return total / (chosen * tokens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e-2])
def test_values_and_gradients_are_those_of_the_code(dtype, scale):
    outputs = (scale * make()["outputs_TKH"]).to(dtype)
    got, slow = (outputs.clone().requires_grad_() for _ in range(2))
    value, expected = span_orthogonality_loss(got), released_orthogonality(slow.double())
    value.backward()
    expected.backward()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.grad, slow.grad, rtol=1e-5, atol=1e-5 * scale)


def test_nearly_equal_outputs_keep_their_digits():
    """What is left of the second output is a millionth of it, and counts."""
    outputs = make(seed=4)["outputs_TKH"]
    outputs[:, 1] = outputs[:, 0] + 1e-6 * outputs[:, 1]
    value = span_orthogonality_loss(outputs)
    torch.testing.assert_close(value, released_orthogonality(outputs), rtol=1e-5, atol=0)


def test_worked_by_hand():
    # y1 = (1, 0), y2 = (1, 1): y1 on y2 is 1/2 long squared, y2 on y1 is 1; the mean of both.
    outputs = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]], dtype=torch.float64)
    assert span_orthogonality_loss(outputs, eps=1e-12).item() == pytest.approx(0.75)
    # Three outputs of a plane: each lies in the span of the others, so all of it counts.
    flat = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    assert span_orthogonality_loss(flat, eps=1e-12).item() == pytest.approx((4 + 1 + 2) / 3)
    # Probabilities 1/4 and 3/4: the variance that divides by E - 1 is 1/8.
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    assert softmax_variance_loss(logits).item() == pytest.approx(-0.125)


def test_the_reshape_groups_by_expert():
    values, keep = make(), mask(17)
    outputs, index = values["outputs_TKH"], values["index_TK"]
    rows = [
        outputs[t, k]
        for expert in range(7)
        for t in range(17)
        for k in range(3)
        if keep[t] and index[t, k] == expert
    ]
    grouped = grouped_by_expert(outputs, index, keep)
    assert torch.equal(grouped, torch.stack(rows).view(-1, 3, 5))
    terms = {"span_orthogonality": {"weight": 2.0, "group_by_expert": True}}
    facts = model_facts(tiny.model("qwen3_moe"))
    found = objective_of(terms, facts)(record(values, "softmax", keep), None)
    expected = 2.0 * released_orthogonality(grouped)
    torch.testing.assert_close(found.weighted["span_orthogonality"].double(), expected)


def test_router_rows_give_the_weight_of_the_loss_on_outputs():
    router = make()["router_weight_EH"][:4]  # as many rows as fit into 5 dimensions
    rows = list(router)
    squares = [reference.span_projection(rows[k], rows[:k] + rows[k + 1 :]) for k in range(3)]
    expected = sum(squares) / 3
    torch.testing.assert_close(router_row_overlap(router, 3), expected, rtol=1e-5, atol=0)


def test_weights_are_powers_of_ten_found_once_in_the_first_layer():
    model = tiny.model("qwen3_moe", num_hidden_layers=2).train()
    facts = model_facts(model)
    objective = objective_of(TERMS, facts)
    seen = []
    ids = torch.arange(4, 21).repeat(2, 1)
    with Recorder(model, objective, observers=[lambda record, _: seen.append(record)]):
        model(input_ids=ids)
        first = seen[0]
        weights = dict(objective.full_weights)
        model(input_ids=ids.flip(-1) + 7)
    value = first.logits_TE.double().softmax(-1).var(-1).mean()
    overlap = router_row_overlap(first.router_weight_EH, facts.top_k)
    assert weights == {
        "span_orthogonality": pytest.approx(10 ** round(math.log10(1e-4 / overlap.item()))),
        "softmax_variance": pytest.approx(10 ** round(math.log10(1e-3 / value.item()))),
    }
    assert objective.full_weights == weights
    again = objective_of(TERMS, facts)
    again.load_state_dict(objective.state_dict())
    assert again.full_weights == weights


def test_a_target_gives_way_to_a_share_and_refuses_what_it_cannot_be():
    terms = resolve_method("orthogonal_variance_released", share=0.1).terms
    for name in TERMS:
        assert (terms[name].share, terms[name].target) == (0.1, None)
    with pytest.raises(RecipeError, match="target: must be greater than 0"):
        resolve_method("orthogonal_variance_released", terms={"softmax_variance": {"target": 0}})
    facts = model_facts(tiny.model("qwen3_moe", num_experts_per_tok=1))
    with pytest.raises(ObjectiveError, match="a token has only one expert, so there are no"):
        objective_of(TERMS, facts)
