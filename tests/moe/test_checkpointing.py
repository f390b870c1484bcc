"""Checkpoint wrappers that a recording cannot stand are refused, and by what is to be done."""

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from moe_finetune.errors import CaptureError
from moe_finetune.recipe.stages import CHECKPOINTING, checkpointing
from moe_finetune.training.specialization import Specialization
from tests.support import tiny

COUPLED = {"terms": {"coupling": {"weight": 0.5}}}


def coupled(model, **call):
    with Specialization(model.train(), COUPLED) as work:
        model(**tiny.batch(rows=2, length=7), **call).loss.backward()
        return work.read()["losses/coupling"]


def wrap(model, place, implementation=CheckpointImpl.NO_REENTRANT):
    layers = model.model.layers
    layers[place] = checkpoint_wrapper(layers[place], checkpoint_impl=implementation)
    return model


@pytest.mark.parametrize("place", [0, 2])
def test_a_reentrant_wrapper_is_refused_on_any_layer(place):
    model = wrap(tiny.model("olmoe", use_cache=False), place, CheckpointImpl.REENTRANT)
    with pytest.raises(CaptureError, match="NO_REENTRANT"):
        coupled(model)


@pytest.mark.parametrize("key", CHECKPOINTING)
def test_either_name_of_the_key_turns_it_on(key):
    assert [checkpointing({key: value}, default=True) for value in (True, False, None)] == [
        True,
        False,
        True,
    ]
    assert not checkpointing({"activation_checkpointing": False, "gradient_checkpointing": True}, 1)


def test_a_layer_of_its_own_mind_is_refused():
    """transformers' own checkpointing, reentrant in one layer that is not the first."""
    model = tiny.model("olmoe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    later = model.model.layers[1]
    keep = later._gradient_checkpointing_func
    later._gradient_checkpointing_func = type(keep)(keep.func, use_reentrant=True)
    with pytest.raises(CaptureError, match="use_reentrant"):
        coupled(model)


def test_a_reentrant_function_behind_a_wrapper_is_refused():
    """As LLaMA-Factory and ms-swift set it: nothing in its arguments says what it does."""
    model = tiny.model("olmoe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    for reentrant in (False, True):
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = lambda function, *args, reentrant=reentrant: (
                checkpoint(function, *args, use_reentrant=reentrant)
            )
        if not reentrant:
            assert coupled(model) < -0.05
    with pytest.raises(CaptureError, match="use_reentrant_gc: false"):
        coupled(model)


def test_a_wrapped_layer_with_a_cache_is_refused():
    model = wrap(tiny.model("olmoe"), 1)
    with pytest.raises(CaptureError, match="use_cache = False"):
        coupled(model)
    wanted = coupled(tiny.model("olmoe"))
    assert coupled(model, use_cache=False) == wanted
    model.config.use_cache = False
    assert coupled(model) == wanted < -0.05


@pytest.mark.parametrize("part", ["mlp", "mlp.gate", "mlp.experts"])
def test_a_wrapper_within_the_layer_is_refused(part):
    model = tiny.model("olmoe", use_cache=False)
    layer = model.model.layers[1]
    layer.set_submodule(part, checkpoint_wrapper(layer.get_submodule(part)))
    with pytest.raises(CaptureError, match="layer 1: a checkpoint wrapper"):
        coupled(model)
    layer.set_submodule(part, layer.get_submodule(part)._checkpoint_wrapped_module)
    layer.self_attn = checkpoint_wrapper(layer.self_attn)
    assert coupled(model) == coupled(tiny.model("olmoe"))
