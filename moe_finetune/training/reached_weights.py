"""Whether training reaches what it should: each loss something trainable, each tensor a change."""

import logging

import torch
from torch import Tensor, nn

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.layers import MoeLayer, backbone_of, causal_lm, moe_layers

log = logging.getLogger(__name__)
REMEDIES = {"router": "router.train: full or lora", "experts": "lora.targets: [..., experts]"}
STEPS = 10
"""Optimizer steps after which tensors are compared with their start."""


def check_reach(model: nn.Module, objective: Objective, dense_router: bool = False) -> None:
    """Refuse a term whose gradient, in its own layers or below, reaches nothing that trains, and
    ``dense_router``, the routers' gradient of all experts, where no router trains.
    """
    layers = moe_layers(model)
    if dense_router and not any("router" in trained_parts(layer) for layer in layers):
        raise ObjectiveError(
            "method.router_gradient: dense: no router trains, so it would change nothing; set "
            f"{REMEDIES['router']} (modules_to_save or target_parameters in PEFT), or "
            "router_gradient: selected"
        )
    for term in objective.terms:
        acting = [layer for layer in layers if term.applies(layer.index)]
        if any(trained_parts(layer) & term.trains for layer in acting):
            continue
        if term.below and acting and _trains_below(model, acting[-1]):
            continue
        raise ObjectiveError(
            f"method.terms.{term.name}: its gradient reaches no trainable parameter. It reads "
            f"{term.reads}; make trainable: "
            f"{' or '.join(REMEDIES[part] for part in sorted(term.trains))}; or remove the term "
            "(weight: 0)"
        )


def trained_parts(layer: MoeLayer) -> set[str]:
    """Which of router and experts have a trainable parameter."""
    parts = {"router": layer.router, "experts": layer.outer_experts}
    return {name for name, module in parts.items() if _trainable(module)}


def _trains_below(model: nn.Module, layer: MoeLayer) -> bool:
    """Whether anything trains that the layer's input depends on."""
    backbone = backbone_of(model)
    later = [layer.router, layer.outer_experts, *list(backbone.layers)[layer.index + 1 :]]
    later += [getattr(backbone, "norm", None), causal_lm(model).get_output_embeddings()]
    modules, places = dict(layer.decoder_layer.named_modules()), layer.places
    later += [modules.get(path) for path in (*places.shared, *places.shared_gates)]
    above = {id(p) for module in later if module is not None for p in module.parameters()}
    return any(p.requires_grad and id(p) not in above for p in model.parameters())


def _trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """A few numbers for each trainable tensor, which change when it changes."""
    return {name: _of(p) for name, p in model.named_parameters() if p.requires_grad}


def unmoved_since(start: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Names of tensors that are as in ``start``; warns about them."""
    now = {name: p for name, p in model.named_parameters() if name in start}
    names = [name for name, p in now.items() if torch.equal(_of(p), start[name])]
    if names:
        counts = f"{len(names)} of {len(start)}"
        few = ", ".join(names[:3])
        log.warning("%s trainable tensors never changed in %d steps, e.g. %s", counts, STEPS, few)
    return names


def _of(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    wide = values.double().reshape(-1)
    ramp = torch.arange(1, wide.numel() + 1, device=wide.device, dtype=torch.float64)
    return torch.stack([wide.sum(), wide.square().sum(), (wide * ramp).sum()]).cpu()
