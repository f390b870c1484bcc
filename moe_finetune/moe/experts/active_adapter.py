"""Whether the trained adapter is the one that is active now, according to PEFT.

A preference trainer computes its reference with the policy's model: with the adapter disabled
(``disable_adapter``) or another one active (TRL's "ref"). Whatever belongs to the trained adapter
but lies outside it, such as a bias, must then be off too, also in layers without a wrapper.
"""

from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


class TrainedAdapter:
    """The adapters of ``model`` that are active and trainable when this is constructed.

    If none is trainable (a finished adapter), all active ones count. ``names`` is empty for a model
    without adapters.
    """

    def __init__(self, model: nn.Module):
        model = getattr(model, "module", model)
        self._peft = model if isinstance(model, PeftModel) else None
        self._modules: list[Any] = [
            module
            for module in model.modules()
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        active = {name for module in self._modules for name in module.active_adapters}
        if self._peft is not None:
            active |= set(self._peft.active_adapters)
        trained = {
            part
            for module in self._modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
            for part in name.split(".")
        }
        self.names = frozenset(active & trained or active)

    def acts(self) -> bool:
        """Whether one of them is active and enabled; True for a model without adapters."""
        peft = self._peft
        if peft is not None and not (
            peft.has_active_enabled_adapter and self.names.intersection(peft.active_adapters)
        ):
            return False
        return not self._modules or any(
            not module.disable_adapters and not self.names.isdisjoint(module.active_adapters)
            for module in self._modules
        )
