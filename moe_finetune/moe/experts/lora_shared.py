"""Shared-outer LoRA: a layer's experts share A of gate and up, and B of the down projection.

B of gate and up and A of down stay each expert's own. At Qwen3-30B-A3B's sizes that is 36 % of the
experts' factors, gradients and optimizer state: 3 D of 2 H + 3 D numbers a rank and expert.

Shape legend: E experts, r rank, I inputs, O outputs, D expert width, H hidden size.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe_finetune.errors import RecipeError
from moe_finetune.moe.experts.lora_on_chosen import PackedLora, SelectedExpertsLora


class SharedOuterLora(PackedLora):
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

    def by_expert(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """The factors with their graph: the shared one ``a_rI`` or ``b_Or``, the other ``b_EOr`` or
        ``a_ErI``."""
        a: Tensor = self.lora_A[adapter_name].weight  # type: ignore[assignment]
        b: Tensor = self.lora_B[adapter_name].weight  # type: ignore[assignment]
        if self.shared == "B":
            return a.view(self.num_experts, -1, a.shape[1]), b
        # A transpose of two dimensions: copying one of three takes three times as long on a CPU.
        b_EOr = b.reshape(-1, self.num_experts).t().contiguous()
        return a, b_EOr.view(self.num_experts, b.shape[0], -1)

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """PEFT's factors ``(lhs, rhs, scaling)`` of the update, for all experts."""
        a, b = self.by_expert(adapter_name)
        experts = len(b if self.shared == "A" else a)
        a_ErI, b_EOr = a.expand(experts, -1, -1), b.expand(experts, -1, -1)
        lhs, rhs = b_EOr, a_ErI
        if not self._did_swap_in_out_features:  # the class stores (E, I, O)
            lhs, rhs = a_ErI.mT, b_EOr.mT
        dtype = self.get_param().dtype
        return lhs.to(dtype), rhs.to(dtype), self.scaling[adapter_name]

    def unpacked(self, side: Literal["A", "B"], factor: Tensor) -> Tensor:
        """With the shared factor repeated."""
        return factor if side != self.shared else repeat(factor, self.num_experts, side)


class SharedOuterOnChosen(SharedOuterLora, SelectedExpertsLora):
    """The shared factor acts in the ``chosen`` experts, which alone have the other one."""

    def by_expert(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        a, b = super().by_expert(adapter_name)
        return (a, self.spread(b)) if self.shared == "A" else (self.spread(a), b)

    def unpacked(self, side: Literal["A", "B"], factor: Tensor) -> Tensor:
        """The shared factor also for experts that were not chosen, so that the shared form has a
        place for it; the other one is zero there."""
        if side != self.shared:
            return SelectedExpertsLora.unpacked(self, side, factor)
        return repeat(factor, self.total_experts, side)


def shared_factors(model: nn.Module) -> dict[str, tuple[Literal["A", "B"], int]]:
    """By module, which factor is stored once, and for how many experts."""
    return {
        name: (module.shared, module.num_experts)
        for name, module in model.named_modules()
        if isinstance(module, SharedOuterLora)
    }


def repeat(factor: Tensor, experts: int, side: Literal["A", "B"]) -> Tensor:
    """A factor of all experts as PEFT packs it: A (E·r, I) by expert, B (O, r·E) by rank."""
    if side == "A":
        return factor.repeat(experts, 1)
    return factor.repeat_interleave(experts, 1)
