"""Expert offload: its logic with copies within the host's memory; on a GPU with streams."""

import pytest
import torch

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.experts.offloaded_stack import OffloadedStack
from moe_finetune.moe.large.offload import (
    CudaTransfers,
    check_offload,
    offload_experts,
)
from moe_finetune.moe.large.quantized_weights import quantize_model
from moe_finetune.moe.layers import moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.quantization.weight import quantized as is_quantized
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests.support import tiny
from tests.support.host_transfers import HostTransfers
from tests.support.tiny_adapter import random_factors

METHOD = {
    "terms": {
        "orthogonality": {"weight": 0.4},
        "coupling": {"weight": 0.4},
        "erc": {"weight": 0.4},  # reads the experts' weights
        "load_balance": {"weight": 0.1},
    },
    "strength": {"first": False},
}


def adapted(family, checkpointing=False, layers=3, quantized=False):
    torch.manual_seed(1)
    base = tiny.model(family, num_hidden_layers=layers)
    if quantized:
        quantize_model(base)
    model = add_lora(base, LoraSection(rank=3, alpha=7.0), "full").train()
    random_factors(model, 0.1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def gradients(model, kernel, device="cpu", method=METHOD):
    batch = {name: tensor.to(device) for name, tensor in tiny.batch().items()}
    model.zero_grad()
    with Specialization(model, method, kernel=kernel, dropout=0.1) as work:
        torch.manual_seed(2)
        model(**batch).loss.backward()
        work.step()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_same_gradients(family, checkpointing):
    for kernel in ("loop", "grouped"):
        wanted = gradients(adapted(family, checkpointing), kernel)
        model = adapted(family, checkpointing)
        offload_experts(model, HostTransfers())
        got = gradients(model, kernel)
        assert got.keys() == wanted.keys() and any("experts" in name for name in got)
        for name, gradient in wanted.items():
            assert torch.equal(got[name], gradient), (kernel, name)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sample", [{}, {"dense_sample": 3}])
def test_routers_learn_from_the_experts_that_a_token_did_not_select(
    sample, checkpointing, quantized
):
    """DenseMixer runs them in the backward, while the layer's stacks are on the device."""
    dense = METHOD | {"router_gradient": "dense", **sample}
    for kernel in ("loop", "grouped"):
        wanted = gradients(adapted("qwen3_moe", checkpointing, 3, quantized), kernel, method=dense)
        model = adapted("qwen3_moe", checkpointing, 3, quantized)
        offload = offload_experts(model, HostTransfers())
        got, fetched = gradients(model, kernel, method=dense), [*offload.fetched]
        selected = gradients(model, kernel)
        for name, gradient in wanted.items():
            assert torch.equal(got[name], gradient), (kernel, name)
        routers = [name for name in wanted if name.endswith("gate.modules_to_save.default.weight")]
        assert routers and all(not torch.equal(got[n], selected[n]) for n in routers)
        assert fetched == [0, 1, 2, 0], "as without: the upper two are still there"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_fetched_before_they_are_needed_and_no_oftener(checkpointing):
    model = adapted("qwen3_moe", checkpointing, layers=5)
    offload = offload_experts(model, HostTransfers())
    most = []
    begin = offload.transfers.begin
    offload.transfers.begin = lambda stacks: (most.append(len(offload.resident)), begin(stacks))[1]
    batch = tiny.batch()
    with Specialization(model, METHOD, kernel="loop") as method:
        offload.fetched.clear()
        model(**batch).loss.backward()
        method.step()
    # The two upper layers are still there when the backward begins, the lower two at the next step.
    assert offload.fetched == [0, 1, 2, 3, 4, 2, 1, 0]
    assert offload.resident == [0, 1] and max(most) <= 1  # beside the one that was begun


def test_quantised_stacks_travel_packed():
    """The same gradients, and the copies that come to the device are packed bytes."""

    for kernel in ("loop", "grouped"):
        expected = gradients(adapted("qwen3_moe", quantized=True), kernel)
        model = adapted("qwen3_moe", quantized=True)
        offload = offload_experts(model, HostTransfers())
        result = gradients(model, kernel)
        for name, gradient in expected.items():
            assert torch.equal(result[name], gradient), (kernel, name)
        assert all(is_quantized(stack) for layer in offload.host for stack in layer.values())
        copies = offload.transfers.begin(offload.host[0])()
        assert all(map(is_quantized, copies.values()))


def test_stacks_and_their_views_hold_no_values():
    model = adapted("qwen3_moe")
    before = {
        layer.index: layer.experts.gate_up_proj.detach().clone() for layer in moe_layers(model)
    }
    offload = offload_experts(model, HostTransfers())
    for position, layer in enumerate(moe_layers(model)):
        stack = layer.experts.gate_up_proj
        assert isinstance(stack, OffloadedStack) and not stack.requires_grad
        offload.fetched.clear()
        rows = stack[2:7, ::2].transpose(1, 2)
        assert isinstance(rows, OffloadedStack) and not offload.fetched
        assert torch.equal(rows + 0, before[layer.index][2:7, ::2].transpose(1, 2))
        assert position in offload.resident
        with pytest.raises(CaptureError, match="frozen"):
            stack.add_(1.0)
    assert model.to("cpu") is model
    assert isinstance(moe_layers(model)[0].experts.down_proj, OffloadedStack)


def test_an_evaluation_between_two_steps():
    """A forward without a backward leaves the direction wrong, which only costs a copy."""
    model = adapted("qwen3_moe")
    offload_experts(model, HostTransfers())
    with Recorder(model), torch.no_grad():
        first = model(**tiny.batch()).logits
        assert torch.equal(model(**tiny.batch()).logits, first)
    got = gradients(model, "loop")
    for name, gradient in gradients(adapted("qwen3_moe"), "loop").items():
        assert torch.equal(got[name], gradient), name


def test_refusals(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"there is no GPU; set model\.offload: none"):
        check_offload()
    with pytest.raises(RecipeError, match="there is no GPU"):
        offload_experts(adapted("qwen3_moe"))
    whole = add_lora(tiny.model("qwen3_moe"), None, "full")
    with pytest.raises(RecipeError, match="train in full"):
        offload_experts(whole, HostTransfers())


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_a_gpu(checkpointing):
    wanted = gradients(adapted("qwen3_moe", checkpointing).cuda(), "grouped", "cuda")
    model = adapted("qwen3_moe", checkpointing)
    offload = offload_experts(model, CudaTransfers(torch.device("cuda", 0)))
    got = gradients(model.cuda(), "grouped", "cuda")
    assert all(stack.is_pinned() for layer in offload.host for stack in layer.values())
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name
