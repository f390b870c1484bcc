"""Routers whose choice flips in a recomputation: nearly equal rows, and a disturbance of 1e-6."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trl.models import enable_selective_activation_checkpointing

from moe_finetune.moe.choice.kept_choice import in_backward
from moe_finetune.moe.layers import backbone_of, moe_layers
from moe_finetune.training.specialization import Specialization
from tests.moe.cases import gradients
from tests.support import tiny, tiny_adapter


@torch.no_grad()
def near_tied(model: nn.Module) -> None:
    """Make each second row of the routers nearly equal to the one before it."""
    generator = torch.Generator().manual_seed(6)
    for layer in moe_layers(model):
        weight = layer.router.get_parameter(layer.places.router_weight)
        noise = torch.randn(weight[1::2].shape, generator=generator)
        weight[1::2] = weight[::2] + 1e-7 * noise
        for name, bias in layer.block.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias[1::2] = bias[::2]


def disturb_recomputations(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)

    def disturbed(module, args):
        noise = torch.randn(args[0].shape, generator=generator)
        return (args[0] + (1e-6 if in_backward() else 0.0) * noise, *args[1:])

    for layer in moe_layers(model):
        layer.router.register_forward_pre_hook(disturbed)


def adapted(family: str, how: str | None) -> nn.Module:
    """A model with an adapter; ``how`` its layers are checkpointed, and disturbed."""
    base = tiny.model(family, use_cache=False)
    near_tied(base)
    model = tiny_adapter.adapted(base, "full").train()
    model.enable_input_require_grads()
    if how is None:
        return model
    disturb_recomputations(model)
    if how == "selective":  # as TRL's gradient_checkpointing_kwargs: {selective: true}
        enable_selective_activation_checkpointing(model)
    if how != "wrapper":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if how in ("wrapper", "nested"):
        layers = backbone_of(model).layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    return model


def step(model, method, batch, keeps=True, backwards=1) -> tuple[dict, dict]:
    """Gradients of one window and what is logged."""
    with Specialization(model, method) as work:
        work.recorder.change(keeps_choice=keeps)
        if work.balancer is not None:
            for bias in work.balancer.bias.values():
                bias += torch.linspace(-0.2, 0.2, bias.numel() // 2).repeat_interleave(2)
        torch.manual_seed(5)
        loss = model(**batch).loss
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        work.step()
        values = work.read()
    return {
        n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients(model).items()
    }, values


def far(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys() and len(ours) > 20
    difference = sum((ours[name] - theirs[name]).square().sum() for name in ours)
    return float((difference / sum(value.square().sum() for value in theirs.values())).sqrt())
