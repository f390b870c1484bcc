"""A model's MoE layers: where they are, their state during a forward, and which can be recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moe_finetune.errors import CaptureError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.losses.record import Projection, ProjectionFactors
from moe_finetune.models import Family, family_of_model
from moe_finetune.models.class_structure import unknown_flags
from moe_finetune.models.module_places import Places
from moe_finetune.moe.checkpointing import inside
from moe_finetune.moe.context import ForwardContext
from moe_finetune.moe.experts.dense_router import DenseScores
from moe_finetune.moe.experts.forward import ExpertsResult
from moe_finetune.moe.experts.gated import OwnGate
from moe_finetune.moe.experts.lora_factors import parameter_wrappers, variants


@dataclass(eq=False)
class MoeLayer:
    """One MoE layer of the model and what its hooks store while it runs.

    ``outer_experts`` are under PEFT's wrappers, ``experts`` inside; ``every_experts`` may run, and
    include copies that PEFT trains in full.
    """

    index: int
    decoder_layer: Any
    block: Any
    router: Any
    experts: Any
    every_experts: list[Any]
    outer_experts: Any
    family: Family
    places: Places
    context: ForwardContext | None = None
    router_output: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    router_input: Tensor | None = None
    router_logits: Tensor | None = None
    dense_scores: DenseScores | None = None
    result: ExpertsResult | None = None
    projection: Callable[[Projection], ProjectionFactors] | None = None

    def clear(self) -> None:
        """Drop references to tensors of a finished forward."""
        self.context = self.router_output = self.router_input = self.result = None
        self.projection = self.router_logits = self.dense_scores = None


def causal_lm(model: nn.Module) -> Any:
    """The language model inside PEFT and other wrappers."""
    inner: Any = getattr(model, "module", model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def backbone_of(model: nn.Module) -> Any:
    """The decoder stack below the language-model head, inside PEFT and other wrappers."""
    inner = causal_lm(model)
    while not hasattr(inner, "layers") and hasattr(inner, "get_decoder"):
        decoder = inner.get_decoder()  # a composite may contain a whole language model
        if decoder is inner:
            break
        inner = decoder
    if not hasattr(inner, "layers"):
        raise CaptureError(f"{type(inner).__name__} has no decoder layers to record")
    return inner


def family_in(model: nn.Module) -> Family:
    """The family of the model inside PEFT and other wrappers."""
    return family_of_model(causal_lm(model))


def places_in(model: nn.Module) -> Places:
    """Where the class of the model inside PEFT and other wrappers has what."""
    return family_in(model).places(causal_lm(model).config)


def moe_layers(model: nn.Module) -> list[MoeLayer]:
    """All MoE layers of the model, in order."""
    backbone = backbone_of(model)
    family = family_in(model)
    places = places_in(model)
    layers = []
    for index in places.moe_layers:
        decoder_layer = inside(backbone.layers[index])
        block = getattr(decoder_layer, places.block_path) if places.block_path else decoder_layer
        outer = getattr(block, places.experts_name, None)
        router = getattr(block, places.router_name, None)
        if outer is None or router is None:
            raise CaptureError(
                f"layer {index} of this {family.title} has no router and experts at "
                f"'{places.router_path}' and '{places.experts_path}'"
            )
        inner, _ = parameter_wrappers(outer)
        copies = variants(inner)
        inner = copies[0]
        layers.append(
            MoeLayer(
                index=index,
                decoder_layer=decoder_layer,
                block=block,
                router=router,
                experts=inner,
                every_experts=copies,
                outer_experts=outer,
                family=family,
                places=places,
            )
        )
    return layers


def model_facts(model: nn.Module) -> ModelFacts:
    """Facts about the model that loss terms are checked against."""
    return config_facts(causal_lm(model).config, family_in(model))


def config_facts(config: Any, family: Family) -> ModelFacts:
    """:func:`model_facts` from a transformers config, before weights are loaded."""
    places = family.places(config)
    return ModelFacts(
        moe_layers=places.moe_layers,
        num_experts=places.num_experts,
        top_k=family.top_k(config),
        vocab_size=config.get_text_config().vocab_size,
        has_gate=places.gated,
        fixed_layers=tuple(family.fixed_layers(config)),
        shared_input_space=not places.separate_spaces,
    )


def check_experts(layer: MoeLayer) -> None:
    """Refuse experts whose layout or execution is not supported."""
    experts, where = layer.experts, f"layer {layer.index}"
    for name in ("has_gate", "has_bias", "is_transposed"):
        if not isinstance(getattr(experts, name, None), bool):
            raise CaptureError(
                f"{where}: {type(experts).__name__} has no {name}: it does not follow the experts "
                "interface of this transformers version"
            )
    if flags := unknown_flags(experts):
        raise CaptureError(
            f"{where}: {type(experts).__name__} sets {', '.join(flags)}, which the experts' "
            "products here do not compute; this model type is not supported"
        )
    if is_spread(experts) and "forward" in layer.router.__dict__:
        raise CaptureError(
            f"{where}: experts are spread over ranks by transformers' plan ep_router, whose "
            "router hides the other ranks' experts; use the plan ep_dispatch_experts with "
            "tp_size=1"
        )


def is_spread(experts: Any) -> bool:
    """Whether the experts are distributed over ranks; never before transformers 5.18."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def is_concatenated(experts: Any) -> bool:
    """Whether a stack has all gate rows before all up rows, instead of alternating rows."""
    declared = getattr(experts, "is_concatenated", None)
    if declared is not None:
        return declared
    if _gates_itself(experts):
        raise CaptureError(
            f"{type(experts).__name__}: this transformers version does not declare how gate and "
            "up projection are stored; install a newer one, or remove the losses that read them"
        )
    return True


def _gates_itself(experts: Any) -> bool:
    return type(experts)._apply_gate.__qualname__ != "_default_apply_gate"


def stacks(experts: Any) -> tuple[Tensor, Tensor]:
    """The two projections of all experts as (E, rows, H) and (E, H, D), however stored."""
    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    down = experts.down_proj
    if experts.is_transposed:
        return up.transpose(1, 2), down.transpose(1, 2)
    return up, down


def activation_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """The gate's function, or the class's own step between its projections."""
    if not experts.has_gate:
        return OwnGate(experts.act_fn)
    if _gates_itself(experts):
        return OwnGate(experts._apply_gate)
    return experts.act_fn


@contextmanager
def in_mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Put the model in train or eval mode inside the context; restore every module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(train)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
