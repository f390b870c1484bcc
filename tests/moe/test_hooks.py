"""The recorded model computes what the stock one does, and injection equals explicit addition."""

import copy

import pytest
import torch
from accelerate.utils import send_to_device
from peft import LoraConfig, get_peft_model

from moe_finetune.errors import CaptureError
from moe_finetune.moe.context import CONTEXT_KEY, ForwardContext, ForwardPlan
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from tests.moe.cases import TERMS, adapted, assert_close, gradients
from tests.support import tiny
from tests.support.objectives import objective_of
from tests.support.tables import TINY_FAMILIES
from tests.training.gradients import policy

FAMILIES = TINY_FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_equal_stock_peft(name):
    model, batch = adapted(name), tiny.batch()
    stock = model(**batch)
    stock.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    with Recorder(model):
        recorded = model(**batch)
        recorded.loss.backward()
    scale = stock.logits.abs().max()
    assert (recorded.logits - stock.logits).abs().max() <= 1e-5 * scale
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_restore_is_exact(name):
    model, batch = adapted(name).eval(), tiny.batch()
    hooks = lambda: [  # noqa: E731
        (n, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__)
        for n, m in model.named_modules()
    ]
    before, logits = hooks(), model(**batch).logits
    implementation = model.config._experts_implementation
    with pytest.raises(ZeroDivisionError), Recorder(model):
        assert hooks() != before
        raise ZeroDivisionError
    assert hooks() == before
    assert model.config._experts_implementation == implementation
    assert torch.equal(model(**batch).logits, logits)


def explicit(model, batch, terms, scale=1.0):
    """Gradients of the loss and of the objective, summed by hand from observed records."""
    model(**batch).loss.backward()
    policy.explicit(model, batch, terms, scale)
    return gradients(model)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_injection_equals_explicit_addition(name, checkpointing):
    model, batch = adapted(name), tiny.batch()
    expected = explicit(model, batch, TERMS, scale=0.25)
    model.zero_grad()
    plain = copy.deepcopy(model)
    plain(**batch).loss.backward()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    objective = objective_of(TERMS, model_facts(model))
    visits = []
    recorder = Recorder(model, objective, observers=[lambda r, _: visits.append(r.layer)])
    recorder.change(scale=lambda: 0.25)
    with recorder:
        model(**batch).loss.backward()
    assert_close(gradients(model), expected, 2e-5)
    assert visits == list(objective.facts.moe_layers)  # a recomputed layer counts once
    with pytest.raises(AssertionError):  # the terms do change the gradient
        assert_close(gradients(plain), expected, 1e-3)


def test_nothing_is_injected_or_recorded_outside_training():
    model, batch = adapted("qwen3_moe"), tiny.batch()
    objective = objective_of(TERMS, model_facts(model))
    visits = []
    with Recorder(model, objective, observers=[lambda r, _: visits.append(r.layer)]):
        with torch.no_grad():
            model(**batch)
        model.eval()
        output = model(**batch)
        output.loss.backward()
        assert not visits
        silent = gradients(model)
    model.zero_grad()
    model(**batch).loss.backward()
    assert_close(silent, gradients(model))


def test_two_forwards_before_one_backward():
    model = adapted("deepseek_v2")
    first, second = tiny.batch(seed=1), tiny.batch(rows=2, length=23, seed=2)
    expected = explicit(model, first, TERMS)
    model.zero_grad()
    other = explicit(model, second, TERMS)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    with Recorder(model, objective_of(TERMS, model_facts(model))):
        (model(**first).loss + model(**second).loss).backward()
    assert_close(gradients(model), {n: expected[n] + other[n] for n in expected}, 2e-5)


def test_a_copy_of_the_context_is_refused():
    """Losses between layers would be lost without a word."""
    model = adapted("olmoe")

    def take_apart(module, args, kwargs):
        return args, {k: copy.copy(v) if k == CONTEXT_KEY else v for k, v in kwargs.items()}

    objective = objective_of({"coupling": {"weight": 2.0}}, model_facts(model))
    layer = model.get_base_model().model.layers[1]
    handle = layer.register_forward_pre_hook(take_apart, with_kwargs=True)
    with Recorder(model, objective), pytest.raises(CaptureError, match="layer 1 received a copy"):
        model(**tiny.batch())
    handle.remove()
    with Recorder(model, objective):
        model(**tiny.batch()).loss.backward()


def test_wrappers_that_map_over_tensors_leave_the_context_whole():
    from torch.distributed.utils import _apply_to_tensors

    context = ForwardContext(ForwardPlan(), train=True, observe=False, scale=1.0, tokens=None)
    given = {"hidden": torch.ones(2), CONTEXT_KEY: [context]}
    for mapped in (
        _apply_to_tensors(lambda t: t + 1, given),
        torch.utils._pytree.tree_map(lambda leaf: leaf, given),
        send_to_device(given, torch.device("meta")),
    ):
        assert mapped[CONTEXT_KEY][0] is context
    assert not context.copied
    assert copy.copy(context).copied and copy.deepcopy(context).copied


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_a_layer_without_its_models_forward_is_refused_in_training(name):
    model = tiny.model(name).train()
    layer, hidden = model.model.layers[1], torch.randn(1, 5, 192)
    positions = torch.arange(5).unsqueeze(0)
    rope = model.model.rotary_emb(hidden, positions)
    objective = objective_of(TERMS, model_facts(model))
    with Recorder(model, objective):
        with pytest.raises(CaptureError, match="layer 1 ran outside its model's forward"):
            layer(hidden, position_embeddings=rope, position_ids=positions)
        with torch.no_grad():
            quiet = layer(hidden, position_embeddings=rope, position_ids=positions)
    assert torch.allclose(
        layer(hidden, position_embeddings=rope, position_ids=positions), quiet, atol=1e-5
    )


def test_coupling_refuses_a_forward_that_skips_the_layer_below():
    model = tiny.model("olmoe").train()
    objective = objective_of({"coupling": {"weight": 1.0}}, model_facts(model))
    layers = model.model.layers
    skip = lambda hidden, **_: hidden  # noqa: E731
    with Recorder(model, objective):
        layers[1].forward = skip
        with pytest.raises(CaptureError, match="layer 2 has no record of the MoE layer below"):
            model(**tiny.batch())
    del layers[1].forward


def test_adapter_life_cycle():
    model, batch = adapted("mixtral").eval(), tiny.batch()
    with torch.no_grad():
        on = model(**batch).logits
        with model.disable_adapter():
            off = model(**batch).logits
        assert (on - off).abs().max() > 1e-2
        with Recorder(model):
            assert torch.allclose(model(**batch).logits, on, atol=1e-4)
            with model.disable_adapter():
                assert torch.allclose(model(**batch).logits, off, atol=1e-4)
            model.merge_adapter()
            assert torch.allclose(model(**batch).logits, on, atol=1e-4)
            model.unmerge_adapter()
            assert torch.allclose(model(**batch).logits, on, atol=1e-4)


def test_two_active_adapters_are_refused():
    model = adapted("qwen3_moe", router="frozen")
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.base_model.set_adapter(["default", "other"])
    with Recorder(model), pytest.raises(CaptureError, match="are both active on"):
        model(**tiny.batch())


def test_full_router_through_modules_to_save():
    base = tiny.model("deepseek_v3")
    model = get_peft_model(
        base,
        LoraConfig(r=4, target_modules=["o_proj"], modules_to_save=["gate"]),
    ).train()
    records = []
    with Recorder(model, observers=[lambda record, _: records.append(record)]):
        model(**tiny.batch()).loss.backward()
    trained = [p for n, p in model.named_parameters() if p.requires_grad and "gate" in n]
    assert [tuple(p.shape) for p in trained] == [(12, 192)] * 2
    assert [r.router_weight_EH.data_ptr() for r in records] == [p.data_ptr() for p in trained]
    assert all(p.grad.abs().max() > 0 for p in trained)


@pytest.mark.parametrize("saved", [["experts"], ["gate", "experts"], ["mlp"]])
def test_experts_that_peft_trains_in_full(saved):
    """``modules_to_save`` keeps the frozen experts beside a copy that trains."""
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
    model, batch = get_peft_model(tiny.model("qwen3_moe"), config).train(), tiny.batch()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.3)
    model(**batch).loss.backward()
    expected = gradients(model)
    with model.disable_adapter(), torch.no_grad():
        off = model(**batch).logits
    model.zero_grad()
    with Recorder(model):
        model(**batch).loss.backward()
        with model.disable_adapter(), torch.no_grad():
            assert torch.allclose(model(**batch).logits, off, atol=1e-4)
    assert_close(gradients(model), expected)
    assert any("down_proj" in name for name in expected)
    terms = {"erc": {"weight": 0.4, "noise": False}, **TERMS}
    model.zero_grad()
    wanted = explicit(model, batch, terms)
    model.zero_grad()
    with Recorder(model, objective_of(terms, model_facts(model))):
        model(**batch).loss.backward()
    assert_close(gradients(model), wanted, 2e-5)


def test_a_model_beside_the_recorded_one_may_share_its_config():
    recorded, batch = tiny.model("olmoe"), tiny.batch()
    other = type(recorded)(recorded.config)
    other.load_state_dict(recorded.state_dict())
    implementation = recorded.config._experts_implementation
    with torch.no_grad(), Recorder(recorded):
        assert recorded.config is other.config
        assert recorded.config._experts_implementation == implementation
        assert torch.allclose(other(**batch).logits, recorded(**batch).logits, atol=1e-4)
    assert recorded.model.layers[0].mlp.experts.config is recorded.config


def test_dropout_acts_in_training_alone_and_repeats_under_checkpointing():
    model, batch = adapted("qwen3_moe", router="frozen"), tiny.batch()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.zero_grad()
        with Recorder(model, dropout=0.5):
            torch.manual_seed(5)
            loss = model(**batch).loss
            loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])
    with Recorder(model, dropout=0.5), torch.no_grad():
        assert (model(**batch).loss - results[0][0]).abs() > 1e-4
        model.eval()
        quiet = model(**batch).loss
    with torch.no_grad():
        assert torch.allclose(model(**batch).loss, quiet, atol=1e-5)
