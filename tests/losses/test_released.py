"""P0's losses as its authors' code computes them: forms, grouping, and weights found once."""

import math
import sys

import pytest
import torch

from moe_finetune.cli import main
from moe_finetune.errors import ObjectiveError, RecipeError
from moe_finetune.losses.base import TERMS, LayerContext, ModelFacts
from moe_finetune.losses.functional import softmax_variance_loss, span_orthogonality_loss
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import resolve_method
from tests.conftest import ROOT
from tests.losses import reference
from tests.losses.cases import make, mask, record
from tests.support import tiny
from tests.support.objectives import objective_of

pytestmark = pytest.mark.usefixtures("p0_released")
FOUND: dict = {"span_orthogonality": {}, "softmax_variance": {}}


def plugin():
    return sys.modules[TERMS["span_orthogonality"].__module__]


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
    grouped = plugin().grouped_by_expert(outputs, index, keep)
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
    torch.testing.assert_close(plugin().router_row_overlap(router, 3), expected, rtol=1e-5, atol=0)


def test_weights_are_powers_of_ten_found_once_in_the_first_layer():
    model = tiny.model("qwen3_moe", num_hidden_layers=2).train()
    facts = model_facts(model)
    objective = objective_of(FOUND, facts)
    seen = []
    ids = torch.arange(4, 21).repeat(2, 1)
    with Recorder(model, objective, observers=[lambda record, _: seen.append(record)]):
        model(input_ids=ids)
        first = seen[0]
        weights = dict(objective.full_weights)
        model(input_ids=ids.flip(-1) + 7)
    value = first.logits_TE.double().softmax(-1).var(-1).mean()
    overlap = plugin().router_row_overlap(first.router_weight_EH, facts.top_k)
    assert weights == {
        "span_orthogonality": pytest.approx(10 ** round(math.log10(1e-4 / overlap.item()))),
        "softmax_variance": pytest.approx(10 ** round(math.log10(1e-3 / value.item()))),
    }
    assert objective.full_weights == weights
    again = objective_of(FOUND, facts)
    again.load_state_dict(objective.state_dict())
    assert again.full_weights == weights


def test_a_weight_or_a_share_is_taken_instead_of_a_first_weight():
    preset = "orthogonal_variance_released"
    shared = resolve_method(preset, share=0.1).terms
    weighted = resolve_method(preset, terms={name: {"weight": 0.3} for name in FOUND}).terms
    targets = {"span_orthogonality": 1e-4, "softmax_variance": 1e-3}
    for name, options in resolve_method(preset).terms.items():
        if name in FOUND:
            assert (options.weight, options.share, options.target) == (None, None, targets[name])
            assert options.finds_weight and not weighted[name].finds_weight
            assert (weighted[name].weight, shared[name].share) == (0.3, 0.1)
        else:
            assert options.weight == 1e-3
    with pytest.raises(RecipeError, match="target: must be greater than 0"):
        resolve_method(preset, terms={"softmax_variance": {"target": 0}})


def test_what_is_refused():
    with pytest.raises(ObjectiveError, match=r"softmax_variance: its first weight is nan.*give a"):
        layer = record({**make(), "logits_TE": torch.zeros(17, 7)})
        facts = ModelFacts(moe_layers=(1,), num_experts=7, top_k=3, vocab_size=13)
        objective_of({"softmax_variance": {}}, facts)(layer, LayerContext())
    facts = model_facts(tiny.model("qwen3_moe", num_experts_per_tok=1))
    with pytest.raises(ObjectiveError, match="a token has only one expert, so there are no"):
        objective_of(FOUND, facts)


@pytest.mark.parametrize("study", ["miniature", "paper0_table1"])
def test_both_studies_name_the_plugin_without_it(study, monkeypatch, capsys):
    monkeypatch.delitem(PRESETS._values, "orthogonal_variance_released")
    file = ROOT / "recipes" / "studies" / f"{study}.yaml"
    assert main(["study", str(file), "--plan"]) == 2
    assert "add --plugin recipes/plugins/p0_released.py" in capsys.readouterr().err
    head = file.read_text().partition("title:")[0]
    assert "--plugin recipes/plugins/p0_released.py" in head
    monkeypatch.delitem(TERMS._values, "softmax_variance")
    with pytest.raises(RecipeError, match=r"softmax_variance: .*add --plugin recipes/plugins"):
        resolve_method({"terms": {"softmax_variance": {}}})
    with pytest.raises(RecipeError, match="unknown loss; did you mean 'variance'"):
        resolve_method({"terms": {"varianc": {}}})
