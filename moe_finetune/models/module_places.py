"""Where a class has its experts, router, attention and shared experts, read on the meta device."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models.class_structure import Site, linears, on_meta, sites, text_of

MIXERS = ("self_attn", "attn", "attention", "linear_attn", "mamba", "conv", "mixer")
"""Names of modules of a decoder layer that read other tokens."""
SHARED = ("mlp", "shared_mlp")
"""Names of modules next to the block that are shared experts."""
NEITHER = ("norm", "_hc", "hyper_connection", "ple", "per_layer_input_gate", "per_layer_projection")
"""Ends of the names of modules that LoRA leaves as they are."""


@dataclass(frozen=True)
class Places:
    """What transformers' class of a config shows.

    Paths are relative to a decoder layer of the loaded model, except ``backbone``; a layer may lack
    some.

    Attributes:
        backbone: path of the decoder in the loaded model.
        moe_layers: decoder layers with routed experts, ascending.
        block_path: the module with router and experts; empty if the decoder layer itself has them.
        router_weight: path of the weight in the router's module.
        gated: whether experts have a gate projection, ``gate_up_proj``, or only ``up_proj``.
        separate_spaces: whether router and experts read vectors from different spaces.
        attention, shared: the linear layers that LoRA adapts.
        shared_gates: linear layers with one output, whose sigmoid weighs the shared expert.
    """

    backbone: str
    moe_layers: tuple[int, ...]
    block_path: str
    experts_name: str
    router_name: str
    router_weight: str
    gated: bool
    num_experts: int
    expert_width: int
    separate_spaces: bool
    attention: tuple[str, ...]
    shared: tuple[str, ...]
    shared_gates: tuple[str, ...]

    @property
    def experts_path(self) -> str:
        return f"{self.block_path}.{self.experts_name}".lstrip(".")

    @property
    def router_path(self) -> str:
        return f"{self.block_path}.{self.router_name}".lstrip(".")

    @property
    def expert_parameters(self) -> tuple[str, str]:
        """Names of the stacked parameters of the loaded experts."""
        return ("gate_up_proj" if self.gated else "up_proj", "down_proj")

    @property
    def expert_targets(self) -> tuple[str, ...]:
        """PEFT ``target_parameters`` of the routed experts."""
        return tuple(f"{self.experts_path}.{name}" for name in self.expert_parameters)

    @property
    def router_target(self) -> str:
        """PEFT ``target_parameters`` entry of the router's weight."""
        return f"{self.router_path}.{self.router_weight}"


def places_of(config: Any, attention: tuple[str, ...] = ()) -> Places:
    """The places in the model of a transformers config; takes no memory.

    Args:
        config: of the whole model, or of a composite's language part.
        attention: linear layers of attention, where the class shows others than LoRA can adapt.
    """
    return _places(config.model_type, text_of(config.to_dict()), attention)


@functools.lru_cache(maxsize=64)
def _places(model_type: str, text: str, declared: tuple[str, ...]) -> Places:
    model = on_meta(model_type, text)
    all_sites = sites(model)
    if not all_sites:
        raise UnsupportedModelError(
            f"this {model_type} config has no layer with experts that {type(model).__name__} of "
            "this transformers version runs by the experts interface"
        )
    facts = {
        (s.block_path, s.experts_name, tuple(s.routers), s.gated, s.num_experts, s.width)
        for s in all_sites
    }
    if len(facts) > 1:
        _refuse(model, "number, width or place of the experts, or the router, differ by layer")
    first = all_sites[0]
    if len(first.routers) != 1:
        candidates = " and ".join(".".join(router) for router in first.routers) or "none"
        _refuse(model, f"of its block's weights, {candidates} could be the router's")
    attention = _attention(model, all_sites, declared)
    mixers = {*MIXERS, *(target.partition(".")[0] for target in attention)}
    shared, shared_gates = _shared(model, all_sites, mixers)
    return Places(
        backbone=first.stack.rpartition(".")[0],
        moe_layers=tuple(site.index for site in all_sites),
        block_path=first.block_path,
        experts_name=first.experts_name,
        router_name=first.routers[0][0],
        router_weight=first.routers[0][1],
        gated=first.gated,
        num_experts=first.num_experts,
        expert_width=first.width,
        separate_spaces=first.inner != first.hidden,
        attention=attention,
        shared=shared,
        shared_gates=shared_gates,
    )


def _refuse(model: Any, why: str) -> NoReturn:
    raise UnsupportedModelError(f"{type(model).__name__}: {why}; this is not supported")


def _attention(model: Any, all_sites: Sequence[Site], declared: Sequence[str]) -> tuple[str, ...]:
    """Linear layers in the modules that read other tokens, but not in modules inside of these; of
    ``declared``, those that some layer has."""
    blocks = {id(site.block) for site in all_sites}
    layers = model.get_submodule(all_sites[0].stack)
    if declared:
        names = [f".{name}" for name, _ in linears(layers)]
        targets = [t for t in declared if any(name.endswith(f".{t}") for name in names)]
    else:
        targets = [
            f"{name}.{inner}"
            for layer in layers
            for name, mixer in layer.named_children()
            if name in MIXERS and id(mixer) not in blocks
            for inner, _ in linears(mixer)
            if "." not in inner
        ]
    if not targets:
        where = ", ".join(declared or MIXERS)
        _refuse(model, f"no linear layer of attention in {where} (Family.attention_targets)")
    return tuple(dict.fromkeys(targets))


def _shared(
    model: Any, all_sites: Sequence[Site], mixers: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Linear layers of shared experts, and their gates with one output: in the block, outside of
    router and experts, or next to it in a module known by name."""
    targets: dict[str, None] = {}
    gates: dict[str, None] = {}
    for site in all_sites:
        skipped = {site.experts_name, *(name for name, _ in site.routers)}
        for name, weight in linears(site.layer):
            in_block = bool(site.block_path) and name.startswith(f"{site.block_path}.")
            part = name.removeprefix(f"{site.block_path}.") if in_block else name
            module = part.partition(".")[0]
            projects = site.inner != site.hidden and site.inner in weight.shape
            if in_block or module in SHARED:
                if module not in skipped and not projects:
                    (gates if 1 in weight.shape else targets)[name] = None
            elif not (module in mixers | skipped or module.endswith(NEITHER)):
                _refuse(
                    model,
                    f"'{module}' of its layers is neither known as attention "
                    f"({', '.join(MIXERS)}; else Family.attention_targets) nor as shared experts",
                )
    return tuple(targets), tuple(gates)
