"""An adapter over a model in PEFT: every tensor goes where its name says, and none may be missing.

``PeftModel.from_pretrained`` is not used: PEFT 0.21 applies the renamings of transformers 4 to keys
that are already right, loses factors that way (shared experts of Laguna and DeepSeek-OCR-2), and
only warns.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from moe_finetune.checkpoint.adapter import CONFIG, PREFIX, Adapter
from moe_finetune.checkpoint.files import read_tensor
from moe_finetune.errors import AdapterError, reason_of
from moe_finetune.io.safetensors_header import TensorInfo

# A router's buffer is saved only where the router trains.
_MAY_LACK = "e_score_correction_bias"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def wrap(model: Any, adapter: Adapter) -> Any:
    """``model`` with PEFT's modules for the adapter's config, with initial values."""
    from peft import LoraConfig, PeftModel, PeftModelForCausalLM

    from moe_finetune.moe.lora_factors import quiet_patterns

    names = {field.name for field in fields(LoraConfig)} - {"peft_type", "auto_mapping"}
    options = {key: value for key, value in adapter.config.items() if key in names}
    # Every initial value is replaced; some of them need weights.
    options |= {"init_lora_weights": True, "inference_mode": True}
    if not hasattr(model, "config") and options.get("target_modules") == "all-linear":
        linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        options["target_modules"] = [name for name in linear if not name.endswith("lm_head")]
    try:
        config = LoraConfig(**options)
        generates = config.task_type == "CAUSAL_LM" and hasattr(model, "config")
        kind = PeftModelForCausalLM if generates else PeftModel
        with warnings.catch_warnings(), quiet_patterns():
            warnings.simplefilter("ignore")
            return kind(model, config)
    except Exception as error:  # PEFT's checks raise half a dozen types
        raise AdapterError(
            f"{adapter.folder / CONFIG}: PEFT cannot apply it to the base: {reason_of(error):.300}"
        ) from error


@torch.no_grad()
def fill(wrapped: Any, adapter: Adapter, layers: int | None = None) -> None:
    """Copy the adapter's tensors into PEFT's modules."""
    from peft import get_peft_model_state_dict

    stored: Mapping[str, TensorInfo] = adapter.tensors
    if layers is not None:
        numbers = {key: _LAYER.search(key) for key in stored}
        stored = {
            k: stored[k] for k, match in numbers.items() if not match or int(match[1]) < layers
        }
    live = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    targets = {key.removeprefix(PREFIX): tensor for key, tensor in live.items()}
    others = dict(wrapped.named_parameters())
    missing = sorted(k for k in targets.keys() - stored.keys() if not k.endswith(_MAY_LACK))
    missing = [key for key in missing if key not in adapter.tables]
    if missing:
        raise AdapterError(
            f"{adapter.folder}: adapter tensor '{missing[0]}' is missing ({len(missing)} in all)"
        )
    for key, info in stored.items():
        target = targets.get(key)
        if target is None:  # a whole embedding that was saved with its factors
            target = others.get(PREFIX + key)
        if target is None or tuple(target.shape) != info.shape:
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' {list(info.shape)} has no place in PEFT"
            )
        target.copy_(read_tensor(info))


@dataclass(frozen=True)
class LoraModule:
    """One of PEFT's LoRA modules.

    Attributes:
        path: in the adapter's keys, with a ``base_layer`` for each wrapper around it.
        loaded: the parameter of the model that it adapts.
    """

    path: str
    loaded: str
    module: Any


def modules_of(wrapped: Any) -> Iterator[LoraModule]:
    """PEFT's modules with factors."""
    from peft.tuners.lora import LoraLayer

    for name, module in wrapped.named_modules():
        if isinstance(module, LoraLayer) and "default" in module.scaling:
            path = name.removeprefix(PREFIX)
            parameter = getattr(module, "parameter_name", "weight")
            loaded = f"{path.replace('.base_layer', '')}.{parameter}"
            yield LoraModule(path, loaded, module)


def modules_for(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A module for each tensor by its name, which PEFT adapts as it did those of transformers 4."""
    root = nn.Module()
    for name in sorted((name for name in shapes if "." in name), key=lambda name: name.count(".")):
        path, _, leaf = name.rpartition(".")
        shape, matrix = shapes[name], len(shapes.get(f"{path}.weight", ())) == 2
        parent = root
        for part in path.split(".")[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        last = path.rpartition(".")[2]
        if matrix and leaf == "weight":
            linear = nn.Linear(shape[1], shape[0], f"{path}.bias" in shapes)
            embeds = last == "embed_tokens"
            parent.add_module(last, nn.Embedding(shape[0], shape[1]) if embeds else linear)
        elif not (matrix and leaf == "bias"):
            if last not in parent._modules:
                parent.add_module(last, nn.Module())
            value = nn.Parameter(torch.empty(shape), requires_grad=False)
            parent.get_submodule(last).register_parameter(leaf, value)
    return root


@contextmanager
def filled(adapter: Adapter, adapted: LoraModule) -> Iterator[None]:
    """Give one module its factors in float32, and take them away again."""
    path, module = adapted.path, adapted.module
    embedding = f"{path}.lora_embedding_A" in adapter.tensors
    before = {}
    for factor in ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B"):
        holder = getattr(module, factor)
        key = f"{path}.{factor}" if embedding else f"{path}.{factor}.weight"
        value = torch.nn.Parameter(read_tensor(adapter.tensors[key]).float())
        if embedding:
            before[factor], holder["default"] = holder["default"], value
        else:
            before[factor], holder["default"].weight = holder["default"].weight, value
    try:
        yield
    finally:
        for factor, value in before.items():
            holder = getattr(module, factor)
            if embedding:
                holder["default"] = value
            else:
                holder["default"].weight = value
