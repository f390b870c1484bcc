"""Experts that another package runs are refused; wrappers of the usual libraries are not."""

import functools
from types import FunctionType, MethodType

import pytest
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_finetune.errors import CaptureError, ForeignKernelError
from moe_finetune.models.class_structure import follows_interface
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny


def function_of(module, name):
    """A function as the package ``module`` would define it."""

    def run(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("no kernel may run here")

    copy = FunctionType(run.__code__, {"__name__": module}, name)
    copy.__module__, copy.__qualname__ = module, name
    return copy


def experts_of(model):
    return model.model.layers[1].mlp.experts


def test_experts_with_a_flag_that_is_not_known_are_refused(model, monkeypatch):
    """As ``has_post_expert_norm`` of transformers 5.20 was: a norm that would be left out."""

    def newer(experts_class=None, *, has_gate=True, has_bias=False, has_next_step=False):
        raise AssertionError("only its signature is read")

    monkeypatch.setattr("transformers.integrations.moe.use_experts_implementation", newer)
    experts_of(model).has_next_step = False
    assert follows_interface(experts_of(model))
    with Recorder(model):
        pass
    experts_of(model).has_next_step = True
    assert not follows_interface(experts_of(model))
    with pytest.raises(CaptureError, match=r"layer 1: Qwen3MoeExperts sets has_next_step"):
        Recorder(model).install()


@pytest.fixture
def model():
    return tiny.model("qwen3_moe")


# Module and function names as the packages' public code has them.
REGISTERED = {
    "scattermoe": "axolotl.integrations.kernels.libs.scattermoe_lora.experts",
    "sonicmoe": "axolotl.integrations.kernels.libs.sonicmoe.experts",
    "deep_ep_grouped_mm": "axolotl.integrations.expert_parallel.experts_fn",
    "unsloth": "unsloth_zoo.temporary_patches.moe_experts_interface",
    "mine": "my_kernels.experts",
}


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_implementation_is_refused(model, name):
    before = ALL_EXPERTS_FUNCTIONS.get(name)
    ALL_EXPERTS_FUNCTIONS.register(name, function_of(REGISTERED[name], "forward"))
    try:
        experts_of(model).config._experts_implementation = name
        with pytest.raises(ForeignKernelError) as raised:
            Recorder(model).install()
    finally:
        if before is not None:
            ALL_EXPERTS_FUNCTIONS.register(name, before)
    message = str(raised.value)
    assert message.startswith(f"layer 0: {REGISTERED[name]} (experts_implementation '{name}')")
    remedy = {"unsloth": "load the model with transformers", "mine": "turn it off"}
    assert remedy.get(name, "use_scattermoe") in message
    assert experts_of(model).config._experts_implementation == name  # nothing was overridden


def test_transformers_own_implementations_are_not(model):
    for name in ("eager", "batched_mm", "grouped_mm", "sonicmoe", "deepgemm"):
        if name == "eager" or name in ALL_EXPERTS_FUNCTIONS:
            experts_of(model).config._experts_implementation = name
            with Recorder(model):
                pass


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("liger_kernel.transformers.swiglu", "LigerExperts.forward", "liger_glu_activation: false"),
        ("unsloth_cached_moe_utils", "forward_moe_backend", "does not import unsloth"),
        ("moe_utils", "forward_moe_backend", "does not import unsloth"),
        ("swift.model.npu_patch.model", "npu_experts_forward", "NPU patch"),
    ],
)
def test_a_forward_on_the_instance_is_refused(model, module, name, remedy):
    experts = experts_of(model)
    experts.forward = MethodType(function_of(module, name), experts)
    with pytest.raises(ForeignKernelError, match=f"layer 1: {module}.{name} runs.*{remedy}"):
        Recorder(model).install()


def test_a_forward_on_the_class_is_refused(model, monkeypatch):
    block = model.model.layers[0].mlp
    patched = function_of("densemixer.models.qwen3_moe_custom", "CustomQwen3MoeBlock.forward")
    monkeypatch.setattr(type(block), "forward", patched)
    with pytest.raises(ForeignKernelError, match=r"layer 0: densemixer.*dense_mixer: false"):
        Recorder(model).install()


def test_a_class_of_another_package_is_refused(model):
    experts = experts_of(model)
    kind = type("LigerExperts", (type(experts),), {"__module__": "liger_kernel.swiglu"})
    kind.forward = function_of("liger_kernel.swiglu", "LigerExperts.forward")
    experts.__class__ = kind
    with pytest.raises(ForeignKernelError, match=r"layer 1: liger_kernel\.swiglu\.LigerExperts"):
        Recorder(model).install()


def test_a_callable_object_as_forward_is_refused_by_its_class(model):
    kernel = type(
        "FusedExperts", (), {"__module__": "liger_kernel.fused", "__call__": lambda *_: 0}
    )
    experts_of(model).forward = kernel()
    with pytest.raises(
        ForeignKernelError, match=r"layer 1: liger_kernel\.fused\.FusedExperts runs"
    ):
        Recorder(model).install()


def test_wrappers_that_call_the_original_are_not(model):
    add_hook_to_module(experts_of(model), ModelHook())
    block = model.model.layers[0].mlp
    block.forward = functools.partial(type(block).forward, block)
    with Recorder(model):
        pass
