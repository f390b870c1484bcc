"""Shared-outer LoRA: a layer's experts share A of gate and up, and B of the down projection.

B of gate and up and A of down stay each expert's own. At Qwen3-30B-A3B's sizes that is 36 % of the
experts' factors, gradients and optimizer state: 3 D of 2 H + 3 D numbers a rank and expert.

Shape legend: E experts, r rank, I inputs, O outputs, D expert width, H hidden size.
"""

from typing import Any, Literal

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from moe_finetune.errors import RecipeError


class SharedOuterLora(ParamWrapper):
    """PEFT's parameter wrapper with one factor, ``shared``, for all experts.

    It is one parameter, ``lora_A`` (r, I) or ``lora_B`` (O, r): optimizer, clipping and training
    states have it once; its gradient is the sum over the experts, and one that no token chose adds
    nothing. The other factor is packed as PEFT packs it.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        parameter_name: str,
        config: Any,
        shared: Literal["A", "B"],
        **options: Any,
    ):
        self.shared = shared
        super().__init__(base_layer, adapter_name, parameter_name, config, **options)
        if not hasattr(self, "_did_swap_in_out_features"):
            raise RecipeError(
                "lora.shared_outer: needs PEFT 0.19 or later; older ones have outputs in A"
            )

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        super().update_layer(adapter_name, r, *args, **kwargs)
        factors = self.lora_A if self.shared == "A" else self.lora_B
        packed: Any = factors[adapter_name].weight
        inputs, outputs = (packed.shape[1], r) if self.shared == "A" else (r, packed.shape[0])
        # As PEFT initializes A of one matrix; the bound depends on the inputs only.
        kind = {"device": packed.device, "dtype": packed.dtype}
        single = nn.Linear(inputs, outputs, bias=False, **kind)
        with torch.no_grad():
            single.weight.copy_(packed[:r] if self.shared == "A" else packed[:, :r])
        single.weight.requires_grad_(packed.requires_grad)
        factors[adapter_name] = single

    def of_experts(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """``a_ErI`` and ``b_EOr``, with their graph; the shared one is a view of one matrix."""
        a: Tensor = self.lora_A[adapter_name].weight  # type: ignore[assignment]
        b: Tensor = self.lora_B[adapter_name].weight  # type: ignore[assignment]
        if self.shared == "A":
            return a.expand(self.num_experts, -1, -1), _by_expert(b, self.num_experts)
        return a.view(self.num_experts, -1, a.shape[1]), b.expand(self.num_experts, -1, -1)

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """PEFT's factors ``(lhs, rhs, scaling)`` of the update, for all experts."""
        a_ErI, b_EOr = self.of_experts(adapter_name)
        lhs, rhs = b_EOr, a_ErI
        if not self._did_swap_in_out_features:  # the class stores (E, I, O)
            lhs, rhs = a_ErI.mT, b_EOr.mT
        dtype = self.get_param().dtype
        return lhs.to(dtype), rhs.to(dtype), self.scaling[adapter_name]

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """The update of the whole stack."""
        lhs, rhs, scaling = self.get_delta_factors(adapter_name)
        return torch.bmm(lhs, rhs) * scaling


def _by_expert(b_Or_E: Tensor, experts: int) -> Tensor:
    """PEFT's packed B (O, r·E) as (E, O, r)."""
    return b_Or_E.unflatten(1, (-1, experts)).permute(2, 0, 1)


def shares_outer(model: nn.Module) -> bool:
    """Whether some experts of ``model`` have a shared factor."""
    return any(isinstance(module, SharedOuterLora) for module in model.modules())


def with_repeated(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors with the shared factors repeated: an ordinary PEFT adapter."""
    repeated = dict(weights)
    for name, module in model.named_modules():
        if not isinstance(module, SharedOuterLora):
            continue
        key = f"{name}.lora_{module.shared}.weight"
        repeated[key] = repeat(weights[key], module.num_experts, module.shared)
    return repeated


def repeat(factor: Tensor, experts: int, side: Literal["A", "B"]) -> Tensor:
    """A factor of all experts as PEFT packs it: A (E·r, I) by expert, B (O, r·E) by rank."""
    if side == "A":
        return factor.repeat(experts, 1)
    return factor.repeat_interleave(experts, 1)
