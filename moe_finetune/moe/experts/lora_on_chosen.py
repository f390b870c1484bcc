"""LoRA on chosen experts of a stack (ESFT); the other experts have no factors.

Shape legend: E experts of the layer, n chosen ones, r rank, I inputs, O outputs.
"""

import copy
from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn


class PackedLora(ParamWrapper):
    """PEFT's parameter wrapper that stores less than both factors of every expert."""

    def unpacked(self, side: Literal["A", "B"], factor: Tensor) -> Tensor:
        """A stored ``lora_A`` or ``lora_B`` as an ordinary adapter has it."""
        raise NotImplementedError

    def copy_adapter(self, source: str, target: str) -> None:
        """Give ``target`` the factors and numbers of ``source``, without a gradient."""
        for values in (*vars(self).values(), *self.children()):
            if isinstance(values, dict | nn.ModuleDict) and source in values:
                values[target] = copy.deepcopy(values[source])
        for factors in (self.lora_A, self.lora_B):
            factors[target].requires_grad_(False)

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The update of the whole stack, zero for experts without factors."""
        lhs, rhs, scaling = self.get_delta_factors(adapter_name)
        return torch.bmm(lhs, rhs) * scaling


class SelectedExpertsLora(PackedLora):
    """PEFT's parameter wrapper with factors only for the ``chosen`` experts.

    They are packed as PEFT packs a whole stack, in the order of ``chosen``: ``lora_A`` (n·r, I)
    with the expert slowest, ``lora_B`` (O, r·n) with the expert fastest. Parameters, gradients,
    optimizer state and checkpoints are n / E of a full adapter's; see :func:`for_all_experts`.
    """

    _places: Tensor

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        parameter_name: str,
        config: Any,
        chosen: Sequence[int],
        **options: Any,
    ):
        self.chosen = tuple(chosen)
        super().__init__(base_layer, adapter_name, parameter_name, config, **options)
        # A buffer moves with the model; a list would be copied to a GPU in every forward, and the
        # forward would wait for it.
        places = torch.tensor(self.chosen, device=self.get_param().device)
        self.register_buffer("_places", places, persistent=False)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int] | tuple[None, None]:
        sizes = super()._get_in_out_features(module)
        self.total_experts, self.num_experts = self.num_experts, len(self.chosen)
        return sizes

    def spread(self, values_nXY: Tensor) -> Tensor:
        """Expand values of the chosen experts to all experts (E, X, Y), with zeros elsewhere."""
        values_EXY = values_nXY.new_zeros(self.total_experts, *values_nXY.shape[1:])
        return values_EXY.index_copy(0, self._places.to(values_nXY.device), values_nXY)

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """PEFT's factors ``(lhs, rhs, scaling)`` of the update, for all experts."""
        lhs, rhs, scaling = super().get_delta_factors(adapter_name)
        return self.spread(lhs), self.spread(rhs), scaling

    def unpacked(self, side: Literal["A", "B"], factor: Tensor) -> Tensor:
        """With zeros for the experts that were not chosen."""
        places, count = torch.tensor(self.chosen), len(self.chosen)
        if side == "A":
            a_nrI = factor.unflatten(0, (count, -1))
            a_ErI = a_nrI.new_zeros(self.total_experts, *a_nrI.shape[1:])
            return a_ErI.index_copy_(0, places, a_nrI).flatten(0, 1)
        b_Orn = factor.unflatten(1, (-1, count))
        b_OrE = b_Orn.new_zeros(*b_Orn.shape[:2], self.total_experts)
        return b_OrE.index_copy_(2, places, b_Orn).flatten(1)


def take_further_adapters(adapted: Any, stacks: Sequence[str]) -> None:
    """Let PEFT add adapters with the same factors next to the trained one of ``adapted``.

    TRL's trainers of preferences and rewards add "ref", a copy for the reference. PEFT recognizes
    only its own class as a wrapper, so it would wrap a stack again, and it would adapt layers
    without chosen experts. A further adapter of the stacks therefore starts as a copy of the
    trained one.

    Args:
        stacks: the ``target_parameters`` of the config that are stacks of experts.
    """

    def packed(
        lora_model: Any, peft_config: Any, model: nn.Module, adapter_name: str, **options: Any
    ) -> list[str]:
        others = copy.copy(peft_config)
        others.target_parameters = [t for t in peft_config.target_parameters if t not in stacks]
        names: list[str] = type(lora_model)._inject_parameters(
            lora_model, peft_config=others, model=model, adapter_name=adapter_name, **options
        )
        copied = [t for t in peft_config.target_parameters if t in stacks]
        for module in model.modules() if copied else ():
            if isinstance(module, PackedLora):
                module.copy_adapter(module.active_adapters[0], adapter_name)
        return names + copied

    # A method, which a copy of the model binds to itself.
    adapted.base_model._inject_parameters = MethodType(packed, adapted.base_model)


def selected_experts(model: nn.Module) -> dict[int, tuple[int, ...]] | None:
    """Chosen experts by decoder layer; None if LoRA is on all experts or on none."""
    chosen: dict[int, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SelectedExpertsLora):
            chosen[int(name.rpartition(".layers.")[2].partition(".")[0])] = module.chosen
    return chosen or None


def for_all_experts(
    model: nn.Module, weights: dict[str, Tensor], layers: Iterable[int]
) -> dict[str, Tensor]:
    """An adapter's tensors with both factors for all experts of all ``layers``.

    Shared ones are repeated, those of experts that were not chosen are zero. The result is an
    ordinary PEFT adapter, which any program reads.
    """
    whole = dict(weights)
    for name, module in model.named_modules():
        if not isinstance(module, PackedLora):
            continue
        sides: tuple[Literal["A", "B"], ...] = ("A", "B")
        keys = {side: f"{name}.lora_{side}.weight" for side in sides}
        head, _, tail = name.rpartition(".layers.")
        inside = tail.partition(".")[2]
        for side, key in keys.items():
            whole[key] = module.unpacked(side, weights[key])
            for layer in layers:
                other = key.replace(name, f"{head}.layers.{layer}.{inside}")
                whole.setdefault(other, torch.zeros_like(whole[key]))
    return whole


def materialize(model: nn.Module, init: Any = True) -> None:
    """Initialize LoRA factors that PEFT left on the meta device, on their base's device; ``init``
    is PEFT's ``init_lora_weights``."""
    from peft.tuners.lora.layer import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for module in layers:
        wrapped = isinstance(module, ParamWrapper)
        base = module.get_param() if wrapped else module.get_base_layer().weight
        if base.device.type == "meta":
            continue
        for name, first in module.lora_A.items():
            if first.weight.device.type == "meta":
                first.to_empty(device=base.device)
                module.lora_B[name].to_empty(device=base.device)
                module.reset_lora_parameters(name, init)
