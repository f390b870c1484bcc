"""Loss-free bias: no change at 0, the rule's steps, selection without weights."""

import pytest
import torch

from moe_finetune.metrics import max_violation
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.choice.select_again import Rule, select_with_bias
from moe_finetune.moe.layers import model_facts, moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny

FAMILIES = tiny.FAMILY_NAMES


def balancer_of(model, update=0.05):
    facts = model_facts(model)
    return BiasBalancer(facts.moe_layers, facts.num_experts, update)


def routed(model, perturbation=None):
    """(logits, weights, index) of every layer of one forward."""
    seen = []
    with (
        torch.no_grad(),
        Recorder(
            model,
            observers=[lambda r, _: seen.append((r.logits_TE, r.weights_TK, r.index_TK))],
            observe="all",
            perturbation=perturbation,
        ),
    ):
        output = model(**tiny.batch())
    return output.logits, seen


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bias_of_zero_changes_no_bit(name):
    model = tiny.model(name)
    plain_logits, plain = routed(model)
    logits, biased = routed(model, balancer_of(model))
    assert torch.equal(logits, plain_logits)
    for (_, weights, index), (_, own_weights, own_index) in zip(biased, plain, strict=True):
        assert torch.equal(weights, own_weights)
        assert torch.equal(index, own_index)


@pytest.mark.parametrize("name", FAMILIES)
def test_selection_equals_a_slow_loop(name):
    model = tiny.model(name)
    config, layer = model.config, moe_layers(model)[0]
    _, seen = routed(model)
    logits, own_weights, own_index = seen[0]
    torch.manual_seed(3)
    bias = torch.randn(12) * 0.3
    rule = Rule(layer)
    weights, index = select_with_bias(logits, bias, own_index, own_weights, rule)
    own_bias = getattr(layer.router, "e_score_correction_bias", torch.zeros(12))
    changed = 0
    for t in range(len(logits)):
        row = logits[t].float()
        scores = row.sigmoid() if name == "deepseek_v3" else row.softmax(0)
        choice = scores + own_bias + bias
        wanted = sorted(range(12), key=lambda e: -choice[e].item())[:3]
        assert sorted(index[t].tolist()) == sorted(wanted)
        changed += set(wanted) != set(own_index[t].tolist())
        total = sum(scores[e].item() for e in wanted)
        for k, e in enumerate(index[t].tolist()):
            value = scores[e].item()
            if name == "deepseek_v3":
                value = value / total * config.routed_scaling_factor
            elif name in ("qwen3_moe", "mixtral"):
                value = value / total
            assert weights[t, k].item() == pytest.approx(value, rel=1e-5)
    assert changed > 5


def test_the_step_follows_the_rule():
    model = tiny.model("qwen3_moe").train()
    balancer = balancer_of(model, update=0.02)
    batch = tiny.batch(rows=4, length=17)
    with Recorder(model, observers=[balancer.observe], perturbation=balancer):
        for rows in (slice(0, 2), slice(2, 4)):
            model(input_ids=batch["input_ids"][rows], attention_mask=batch["attention_mask"][rows])
        load = torch.stack([balancer._load[layer] for layer in balancer.bias])
        # both micro-batches, counted tokens alone
        assert load.sum(1).tolist() == [batch["attention_mask"].sum() * 3.0] * 3
        balancer.step()
    moved = torch.stack(list(balancer.bias.values()))
    assert torch.allclose(moved, 0.02 * torch.sign(load.mean(1, keepdim=True) - load), atol=1e-6)
    assert all(counts.abs().max() == 0 for counts in balancer._load.values())


def test_steps_even_the_load():
    torch.manual_seed(0)
    experts, tokens = 12, 600
    logits = torch.randn(tokens, experts) + torch.linspace(-0.7, 0.7, experts)
    layer = moe_layers(tiny.model("qwen3_moe"))[1]
    rule = Rule(layer)
    balancer = BiasBalancer((1,), experts, update=2e-3)
    own = logits.softmax(-1).topk(3)
    violation = []
    for _ in range(80):
        _, index = select_with_bias(logits, balancer.bias[1], own.indices, own.values, rule)
        balancer._load[1] = load = torch.bincount(index.flatten(), minlength=experts).float()
        violation.append(max_violation(load))
        balancer.step()
    assert violation[0] > 0.5
    assert max(violation[-10:]) < 0.3 * violation[0]


def test_state_and_export():
    model = tiny.model("deepseek_v3")
    balancer = balancer_of(model)
    balancer.bias[1] = torch.linspace(-0.1, 0.1, 12)
    other = balancer_of(model)
    other.load_state_dict(balancer.state_dict())
    assert torch.equal(other.bias[1], balancer.bias[1])
    exported = balancer.effective(moe_layers(model))
    own = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.allclose(exported["bias.1"], own + balancer.bias[1])
    assert own.abs().max() > 0.01
