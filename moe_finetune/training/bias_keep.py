"""A learned routing bias stays with the weights that were trained with it.

Between trainings the recorder is off. The bias then acts through hooks on the routers alone, and
whatever ``save_pretrained`` writes has it: beside an adapter in ``router_bias.safetensors``, inside
a whole model where the family keeps one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.moe.bias import BiasBalancer
from moe_finetune.moe.layers import MoeLayer, moe_layers
from moe_finetune.training.bias_export import add_bias, name_bias, save_beside

log = logging.getLogger(__name__)


class KeptBias:
    """Puts a balancer's bias into a model's forwards and saves, and takes it off again.

    Args:
        model: whose ``save_pretrained`` is extended; under PEFT the adapted model.
        balancer: the bias, as it is at each call.
        owner: kept alive as long as the model has the bias.
        in_checkpoints: whether a whole model is saved with it; an adapter always is.
    """

    def __init__(
        self, model: nn.Module, balancer: BiasBalancer, owner: object, in_checkpoints: bool = True
    ):
        self.model: Any = getattr(model, "module", model)
        self.balancer = balancer
        self.owner = owner
        self._wanted = in_checkpoints or isinstance(self.model, PeftModel)
        self._unhook: list[Callable[[], None]] = []

    def in_saves(self) -> None:
        """Write the bias with everything that the model saves from now on."""
        done = "save_pretrained" in self.model.__dict__
        if done or not (self._wanted and hasattr(self.model, "save_pretrained")):
            return
        original = self.model.save_pretrained
        self.model.__dict__["save_pretrained"] = wraps(original)(partial(self._save, original))

    def in_forwards(self) -> None:
        """Select with the bias in every forward from now on, as the recorder did."""
        if self._unhook:
            return
        self.balancer.install(self.model)
        for layer in moe_layers(self.model):
            hook = layer.router.register_forward_hook(partial(self._after_router, layer))
            self._unhook.append(hook.remove)

    def remove(self) -> None:
        """Leave the model without the bias."""
        while self._unhook:
            self._unhook.pop()()
        self.model.__dict__.pop("save_pretrained", None)

    def _after_router(self, layer: MoeLayer, module: nn.Module, args: tuple, output: Any) -> Any:
        logits, weights, index = output
        return logits, *self.balancer.routing(layer, logits, weights, index)

    def _save(self, original: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        folder, layers = Path(save_directory), moe_layers(self.model)
        writes = kwargs.get("is_main_process", True)
        if isinstance(self.model, PeftModel):
            found = original(save_directory, *args, **kwargs)
            for name in self.balancer.adapters if writes else ():
                adapter = folder if name == "default" else folder / name
                if adapter.is_dir():
                    save_beside(self.balancer, layers, adapter)
            return found
        state = kwargs.get("state_dict")
        try:
            state = add_bias(self.balancer, layers, state or self.model.state_dict())
        except UnsupportedModelError:
            log.warning(
                "WARNING: %s is saved without the routing bias that was learned: a checkpoint of "
                "%s has no place for one, and its routing differs from training",
                folder,
                layers[0].family.title,
            )
            return original(save_directory, *args, **kwargs)
        found = original(save_directory, *args, **{**kwargs, "state_dict": state})
        if writes:
            name_bias(layers, folder)
        return found
