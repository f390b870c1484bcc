"""Quantize weights while ``from_pretrained`` reads them: ``quantization_config=Nf4Config(family)``.

Each parameter of :func:`quantized_names` is read, converted, quantized and freed before the next.
The loaded model has packed, frozen weights, and its config is as in the checkpoint.
"""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_finetune.errors import CheckpointError
from moe_finetune.models import Family
from moe_finetune.moe.large.quantized_weights import quantized_names
from moe_finetune.quantization.codec import BITS
from moe_finetune.quantization.weight import QuantizedWeight, quantized

METHOD = "moe_finetune_nf4"


class Nf4Config(QuantizationConfigMixin):
    """Ask ``from_pretrained`` for :class:`Nf4Quantizer`."""

    def __init__(self, family: Family):
        self.quant_method, self.family = METHOD, family  # type: ignore[assignment]


class Quantize(ConversionOps):
    """The last conversion of a tensor that is read: its quantized form."""

    def __init__(self, overflowing: list[str]):
        self.overflowing = overflowing

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        packed = {}
        for name, value in input_dict.items():
            weight = QuantizedWeight.of(value[0] if isinstance(value, list) else value)
            packed[name] = nn.Parameter(weight, requires_grad=False)
            if not weight.is_finite():
                self.overflowing.append(name)
        return packed


@register_quantizer(METHOD)
class Nf4Quantizer(HfQuantizer):
    """Quantizes experts and linear layers as a checkpoint of floats is read."""

    is_trainable = False
    quantization_config: Nf4Config

    def __init__(self, config: Nf4Config, **options: Any):
        super().__init__(config, **options)
        self._overflowing: list[str] = []

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        self._names = quantized_names(model, self.quantization_config.family.places(model.config))

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        return param_name in self._names

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        return BITS / 8 if param_name in self._names else param.element_size()

    def get_quantize_ops(self) -> Quantize:
        return Quantize(self._overflowing)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        if self._overflowing:
            raise CheckpointError(
                f"'{self._overflowing[0]}' has values that overflow the model's dtype; use a wider "
                "model.dtype"
            )
        self.remove_quantization_config(model)
        for module in model.modules():  # Jamba would compute with it in another order
            vars(getattr(module, "config", module)).pop("_is_quantized", None)
        for parameter in model.parameters():
            if quantized(parameter):  # one that ranks share is made trainable
                parameter.requires_grad_(False)
