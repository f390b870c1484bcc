"""Keep a learned routing bias with the weights that were trained with it.

Between trainings it acts through hooks on the routers, and ``save_pretrained`` writes it: next to
an adapter as ``router_bias.safetensors``, or inside a model whose family has a tensor for it.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from moe_finetune.checkpoint.adapters.files import BIAS_FILE, read_metadata, write_metadata
from moe_finetune.checkpoint.exported_bias import bias_config, bias_name
from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.io.json_file import read_object
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.layers import MoeLayer, moe_layers
from moe_finetune.moe.recorder.layer_hooks import LayerVisits
from moe_finetune.training.save_and_resume.state_files import save_state

log = logging.getLogger(__name__)


class KeptBias:
    """Adds a balancer's bias to a model's forwards and saves, and removes it again.

    ``owner`` is kept alive as long as the model has the bias; ``in_checkpoints``: a whole model,
    too, is saved with it.
    """

    def __init__(
        self,
        model: nn.Module,
        balancer: BiasBalancer,
        owner: object,
        in_checkpoints: bool = True,
    ):
        self.model: Any = getattr(model, "module", model)
        self.balancer = balancer
        self.owner = owner
        self._wanted = in_checkpoints or isinstance(self.model, PeftModel)
        self._unhook: list[Callable[[], None]] = []
        self._saves = False
        self._former_save: Any = None

    def in_saves(self) -> None:
        """From now on, write the bias with everything that the model saves."""
        if self._saves or not (self._wanted and hasattr(self.model, "save_pretrained")):
            return
        self._saves, self._former_save = True, self.model.__dict__.get("save_pretrained")
        original = self.model.save_pretrained
        self.model.__dict__["save_pretrained"] = wraps(original)(partial(self._save, original))

    def in_forwards(self) -> None:
        """From now on, add the bias to the selection in every forward, as the recorder did."""
        if self._unhook:
            return
        self.balancer.install(self.model)
        layers = moe_layers(self.model)
        for layer in layers:
            visits = LayerVisits(layer, layers, self.balancer)
            hooks = [layer.router.register_forward_hook(visits.after_router)]
            hooks += [
                head.register_forward_hook(visits.note_logits) for head in visits.logits_modules()
            ]
            hooks += [
                experts.register_forward_pre_hook(visits.before_experts)
                for experts in layer.every_experts
            ]
            self._unhook += [hook.remove for hook in hooks]

    def remove(self) -> None:
        """Remove the bias from the model's forwards and saves."""
        while self._unhook:
            self._unhook.pop()()
        if self._saves:
            self._saves = False
            del self.model.__dict__["save_pretrained"]
            if self._former_save is not None:
                self.model.__dict__["save_pretrained"] = self._former_save

    def _save(self, original: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        folder, layers = Path(save_directory), moe_layers(self.model)
        writes = kwargs.get("is_main_process", True)
        if isinstance(self.model, PeftModel):
            result = original(save_directory, *args, **kwargs)
            for name in self.balancer.adapters if writes else ():
                adapter = folder if name == "default" else folder / name
                if adapter.is_dir():
                    save_beside(self.balancer, layers, adapter)
            return result
        state = kwargs.get("state_dict")
        try:
            state = add_bias(self.balancer, layers, state or self.model.state_dict())
        except UnsupportedModelError:
            log.warning(
                "WARNING: %s is saved without the learned routing bias, because a checkpoint of "
                "%s cannot store one; its routing differs from training",
                folder,
                layers[0].family.title,
            )
            return original(save_directory, *args, **kwargs)
        result = original(save_directory, *args, **{**kwargs, "state_dict": state})
        if writes:
            name_bias(layers, folder)
        return result


def save_beside(balancer: BiasBalancer, layers: Sequence[MoeLayer], adapter: Path) -> None:
    """Write the bias into an adapter's folder, whose metadata say so; a merge moves it."""
    save_state(adapter / BIAS_FILE, balancer.effective(layers))
    metadata = read_metadata(adapter)
    extra = {**metadata.extra, "router_bias": True}
    write_metadata(adapter, metadata.experts, metadata.experts_dropout, **extra)


def add_bias(
    balancer: BiasBalancer, layers: Sequence[MoeLayer], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a whole model's ``state`` with the bias in its family's tensor."""
    bias_config(layers[0].family, layers[0].experts.config.to_dict())
    values = balancer.effective(layers)
    biases = {bias_name(at.places, at.index, state): values[f"bias.{at.index}"] for at in layers}
    return {**state, **biases}


def name_bias(layers: Sequence[MoeLayer], folder: Path) -> None:
    """Declare the bias from :func:`add_bias` in the checkpoint's ``config.json``."""
    change_config(folder, lambda config: bias_config(layers[0].family, config))


def change_config(folder: Path, changes: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Update ``config.json`` in ``folder`` with what ``changes`` returns for its content."""
    file = folder / "config.json"
    config = read_object(file, CheckpointError, "train again")
    if changed := changes(config):
        file.write_text(json.dumps({**config, **changed}, indent=2) + "\n", encoding="utf-8")
