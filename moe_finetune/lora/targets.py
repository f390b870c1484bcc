"""Put LoRA where the recipe says: attention, shared experts, routed experts, router.

Two traps of PEFT 0.21 shape this file:

- on these models it silently turns ``target_modules`` such as ``shared_experts.gate_proj`` into the
  *routed* experts' fused parameters, so shared experts are named as parameters here;
- it refuses ``lora_dropout`` if any parameter is a target, so the configuration has 0 and the
  recipe's dropout is set on the modules afterwards (and again on resume).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from moe_finetune.errors import DataError, RecipeError
from moe_finetune.lora.select import ExpertSelection, count_of
from moe_finetune.moe.experts.lora_factors import parameter_wrappers, quiet_patterns
from moe_finetune.moe.experts.lora_on_chosen import (
    SelectedExpertsLora,
    materialize,
    take_further_adapters,
)
from moe_finetune.moe.experts.lora_shared import SharedOuterLora, SharedOuterOnChosen
from moe_finetune.moe.layers import causal_lm, family_in, moe_layers, places_in
from moe_finetune.quantization.weight import quantized

if TYPE_CHECKING:
    from peft import LoraConfig

    from moe_finetune.recipe.sections import LoraSection, RouterLayers

log = logging.getLogger(__name__)
# PEFT takes these names for parts of the experts' stacks.
_HALVES = ("gate_proj", "up_proj", "down_proj")


def lora_config(
    model: nn.Module, lora: LoraSection, router: str, router_layers: RouterLayers = "all"
) -> LoraConfig:
    """The PEFT configuration of a recipe's ``lora`` and ``router`` sections for this model."""
    from peft import LoraConfig

    family, places = family_in(model), places_in(model)
    scoped = partial(_scoped, model, f"{places.backbone}.layers.")

    def of_routers(path: str) -> list[str]:
        if router_layers == "all":
            return scoped([path])
        layers = routers_in(model, router_layers)
        return [f"{places.backbone}.layers.{layer}.{path}" for layer in layers]

    modules: dict[str, list[str]] = {}
    parameters: dict[str, list[str]] = {}
    for part in lora.targets:
        if part == "experts":
            parameters[part] = list(places.expert_targets)
        elif part == "shared_experts":
            parameters[part] = [f"{target}.weight" for target in places.shared]
        else:
            linear = places.attention
            halves = {t for t in linear if t.rpartition(".")[2] in _HALVES}
            modules[part] = scoped([t for t in linear if t not in halves])
            parameters[part] = [f"{target}.weight" for target in linear if target in halves]
        parameters[part] = scoped(parameters[part])
        # The default names all three, so that a model with shared experts trains them.
        if not (modules.get(part) or parameters[part]) and "targets" in lora.model_fields_set:
            log.warning(
                "lora.targets: %s has no %s, so that target adapts nothing", family.title, part
            )
    if router == "lora":
        parameters["router"] = of_routers(places.router_target)
    # With the block's name: PEFT matches ends, and other modules are called *_gate too.
    saved = of_routers(places.router_path) if router == "full" else []
    gates = scoped(list(places.shared_gates))
    if lora.shared_expert_gate == "lora":
        modules["shared_expert_gate"] = gates
    elif lora.shared_expert_gate == "full":
        saved += gates
    if lora.shared_expert_gate != "frozen" and not gates:
        log.warning(
            "lora.shared_expert_gate: %s has none, so that key trains nothing", family.title
        )
    if not any([*modules.values(), *parameters.values()]):
        raise RecipeError(
            f"lora.targets: {lora.targets} matches nothing in {family.title}; "
            "choose from attention, shared_experts, experts"
        )
    assert lora.rank is not None and lora.alpha is not None
    top_k = family.top_k(causal_lm(model).config)
    patterns = {
        re.escape(target): options.resolved(lora, top_k)
        for part, options in lora.parts.items()
        for target in (*modules.get(part, ()), *parameters.get(part, ()))
    }
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        rank_pattern={name: rank for name, (rank, _) in patterns.items()},
        alpha_pattern={name: alpha for name, (_, alpha) in patterns.items()},
        use_rslora=lora.use_rslora,
        lora_dropout=0.0,
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        target_modules=list(chain(*modules.values())),
        target_parameters=list(chain(*parameters.values())) or None,
        modules_to_save=saved or None,
        task_type="CAUSAL_LM",
    )


def routers_in(model: nn.Module, router_layers: RouterLayers) -> list[int]:
    """Decoder layers whose routers train: numbers of MoE layers, or from -1 on from the end."""
    moe = places_in(model).moe_layers
    if router_layers == "all":
        return list(moe)
    for layer in router_layers:
        if layer not in moe and not -len(moe) <= layer < 0:
            raise RecipeError(
                f"router.layers: {layer} is not a MoE layer, which are {list(moe)}; -1 is the last"
            )
    return sorted({moe[layer] if layer < 0 else layer for layer in router_layers})


def add_lora(
    model: nn.Module,
    lora: LoraSection | None,
    router: str,
    router_layers: RouterLayers = "all",
    measured: Mapping[int, list[int]] | None = None,
) -> nn.Module:
    """Freeze the model and add the adapter.

    Without ``lora`` the whole model trains; with a full router and no targets, only the routers do.
    Both work without an adapter, because PEFT has none that only saves modules. A router or gate
    that trains in full becomes float32, because updates at usual learning rates are below the
    resolution of bfloat16. With a selection of experts, only those get factors; ``measured`` are
    those of a ``lora.experts`` that is measured, in whose place a model without weights has as many
    others.
    """
    from peft import get_peft_model

    held_quantized = any(quantized(parameter) for parameter in model.parameters())
    if lora is None and held_quantized:
        raise RecipeError(
            "lora: null trains all weights, but this model's are quantized; add a `lora:` "
            "section with a rank, or load it without quantization"
        )
    without_gradient = _without_gradient(model)
    places, layers = places_in(model), routers_in(model, router_layers)
    if lora is None:
        router_weight = f".{places.router_target}"
        trained = {f"{places.backbone}.layers.{layer}{router_weight}" for layer in layers}
        for name, parameter in model.named_parameters():
            is_router = name.endswith(router_weight)
            frozen = is_router and (router == "frozen" or name not in trained)
            parameter.requires_grad_(not frozen and name not in without_gradient)
        return model
    if not adapts(lora, router):
        _train_routing_only(model, lora, router, layers)
        return model
    chosen = read_selection(model, lora, measured)
    config = lora_config(model, lora, router, router_layers)
    with quiet_patterns():
        adapted = get_peft_model(
            model,  # type: ignore[arg-type]
            config,
            low_cpu_mem_usage=chosen is not None or lora.shared_outer,
        )
    if chosen is not None or lora.shared_outer:
        pack_factors(adapted, config, chosen, lora.shared_outer)
        materialize(adapted, config.init_lora_weights)
        ends = tuple(places_in(adapted).expert_targets)
        stacks = [name for name in config.target_parameters or () if name.endswith(ends)]
        take_further_adapters(adapted, stacks)
    set_dropout(adapted, lora.dropout)
    widen_copies(adapted)
    for name, parameter in adapted.named_parameters():
        if _own_name(name) in without_gradient:
            parameter.requires_grad_(False)
    # DDP would send rank 0's weights to all; each has read its own from the files.
    adapted._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
        name
        for name, parameter in adapted.named_parameters()
        if quantized(parameter) or hasattr(parameter, "device_mesh")
    ]
    return adapted


def _train_routing_only(
    model: nn.Module, lora: LoraSection, router: str, layers: list[int]
) -> None:
    """Train nothing but the routers of ``layers`` and the shared experts' gates, if in full."""
    places = places_in(model)
    chosen = layers if router == "full" else []
    routers = [layer.router for layer in moe_layers(model) if layer.index in chosen]
    gates = [gate for _, gate in gates_in(model) if lora.shared_expert_gate == "full"]
    weights = [one.get_parameter(places.router_weight) for one in routers]
    weights += [gate.get_parameter("weight") for gate in gates]
    if not weights:
        raise RecipeError(
            f"lora.shared_expert_gate: {family_in(model).title} has none, so nothing trains; add "
            "to lora.targets, or set router.train: full"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is weight for weight in weights))
    for one in routers:
        widen(one)
    for gate in gates:
        widen_gate(gate)


def _without_gradient(model: nn.Module) -> set[str]:
    """Names of parameters that the model's class itself freezes, such as a selection bias."""
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return still if len(still) < len(list(model.parameters())) else set()


def _own_name(name: str) -> str:
    """The model's name for a parameter that PEFT copied to train in full."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")


def adapts(lora: LoraSection | None, router: str) -> bool:
    """Whether :func:`add_lora` makes an adapter; otherwise the model's own weights train."""
    return lora is not None and lora.adapts(router)


def read_selection(
    model: nn.Module, lora: LoraSection, measured: Mapping[int, list[int]] | None = None
) -> dict[int, list[int]] | None:
    """Chosen experts by decoder layer from ``lora.experts``, or None for all."""
    if lora.experts == "all":
        return None
    places = places_in(model)
    if not isinstance(lora.experts, str):
        if measured is not None:
            return dict(measured)
        if next(model.parameters()).device.type != "meta":
            raise RecipeError(
                "lora.experts: is measured by a run only; give a file that 'moe-finetune select "
                "TRACE --top 25%' wrote"
            )
        if lora.experts.top is None:
            return None  # planned as all: how many top_p takes is not known
        count = count_of(lora.experts.top, places.num_experts)
        return {layer: list(range(count)) for layer in places.moe_layers}
    try:
        selection = ExpertSelection.read(lora.experts)
        selection.check(family_in(model).model_type, places.moe_layers, places.num_experts)
        if not selection.experts:
            raise DataError(f"{lora.experts}: no experts; leave 'experts' out of lora.targets")
    except DataError as error:
        raise DataError(f"lora.experts: {error}") from error
    return selection.experts


def pack_factors(
    adapted: nn.Module, config: LoraConfig, chosen: Mapping[int, list[int]] | None, shared: bool
) -> None:
    """Replace PEFT's wrappers of whole expert stacks with ones that store less.

    ``chosen``: experts with factors by decoder layer; layers that it lacks get none. ``shared``:
    the outer factors, A of gate and up and B of the down projection, are those of all experts.
    """
    for layer in moe_layers(adapted):
        experts: Any
        wrappers: dict[str, Any]
        experts, wrappers = parameter_wrappers(layer.outer_experts)
        if chosen is not None and layer.index not in chosen:
            wrappers = {}
        for name, wrapper in reversed(wrappers.items()):  # inner first
            adapter = wrapper.active_adapters[0]
            side: Literal["A", "B"] = "B" if name == layer.places.expert_parameters[1] else "A"
            make: Callable[..., Any]
            if chosen is None:
                make = partial(SharedOuterLora, shared=side)
            elif shared:
                make = partial(SharedOuterOnChosen, shared=side, chosen=chosen[layer.index])
            else:
                make = partial(SelectedExpertsLora, chosen=chosen[layer.index])
            ranks = {"r": wrapper.r[adapter], "lora_alpha": wrapper.lora_alpha[adapter]}
            experts = make(experts, adapter, name, config, **ranks)
            for factors in (experts.lora_A, experts.lora_B):
                factors.to(wrapper.lora_A[adapter].weight.dtype)
        setattr(layer.block, layer.places.experts_name, experts)


def set_dropout(model: nn.Module, dropout: float) -> None:
    """Set LoRA dropout in PEFT's linear layers; experts get it from the recorder."""
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if isinstance(module, Linear):
            for name in module.lora_dropout:
                module.lora_dropout[name] = nn.Dropout(dropout) if dropout else nn.Identity()


def widen_copies(model: nn.Module) -> None:
    """Convert trainable copies of routers and shared experts' gates to float32."""
    gates = {id(gate) for _, gate in gates_in(model)}
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            change = widen_gate if id(module) in gates else widen
            for copy in module.modules_to_save.values():
                change(copy)
            module.__class__ = _WideCopies
            cast(_WideCopies, module).widen = change


class _WideCopies(ModulesToSaveWrapper):
    """Copies in float32, also of a further adapter.

    TRL's trainers of preferences and rewards add "ref", a copy for the reference. PEFT makes it
    from the base's module, and a router that computes in bfloat16 selects other experts.
    """

    widen: Callable[[nn.Module], None]

    def update(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's, and the copy that it adds is in float32."""
        known = adapter_name in self.modules_to_save
        super().update(adapter_name, *args, **kwargs)
        if not known:
            self.widen(self.modules_to_save[adapter_name])


def gates_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The shared experts' gates of the MoE layers, under PEFT's wrappers, by name in ``model``."""
    ends = tuple(f".{target}" for target in places_in(model).shared_gates)
    return [(name, module) for name, module in model.named_modules() if name.endswith(ends)]


def widen_gate(gate: nn.Module) -> None:
    """Convert a shared expert's gate to float32; its result keeps the model's dtype, in which the
    block adds the shared expert to the routed ones."""
    dtype = next(gate.parameters()).dtype
    widen(gate)
    gate.register_forward_hook(partial(_narrowed, dtype))


def widen(router: nn.Module) -> None:
    """Convert a router to float32, and its inputs from a bfloat16 model, with or without hooks."""
    router.float()
    router.register_forward_pre_hook(_widened)


def _widened(router: nn.Module, args: tuple) -> tuple:
    return (args[0].to(next(router.parameters()).dtype), *args[1:])


def _narrowed(dtype: torch.dtype, gate: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output.to(dtype)


def _scoped(model: nn.Module, stack: str, targets: list[str]) -> list[str]:
    """``targets``, by layer if modules outside ``stack`` match their ends, as PEFT would."""
    names = [name for name, _ in chain(model.named_modules(), model.named_parameters())]
    elsewhere = [name for name in names if not name.startswith(stack)]
    scoped: list[str] = []
    for target in targets:
        if _any_ends(elsewhere, f".{target}"):
            scoped += [n for n in names if n.startswith(stack) and n.endswith(f".{target}")]
        else:
            scoped.append(target)
    return scoped


def _any_ends(names: list[str], suffix: str) -> bool:
    return any(name.endswith(suffix) for name in names)
