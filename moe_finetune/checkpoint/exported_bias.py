"""Where a loss-free routing bias goes in an exported checkpoint.

DeepSeek-V3's class has the tensor. For DeepSeek-V2 ``topk_method: noaux_tc`` makes vLLM's class,
not transformers', create it: that export is for serving only. Other families have none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.models.family import CORRECTION_BIASES, Family
from moe_finetune.models.module_places import Places

_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "softmax", "n_group": 1, "topk_group": 1}
OTHER = "; the adapter was trained on another base"


def bias_name(places: Places, layer: int, loaded: Iterable[str]) -> str:
    """Name of a layer's bias among ``loaded``, a model's tensors, or the one that it would have."""
    inside = f"{places.backbone}.layers.{layer}."
    names = (n for n in loaded if n.startswith(inside) and n.endswith(CORRECTION_BIASES))
    return next(names, f"{inside}{places.router_path}.{CORRECTION_BIASES[0]}")


def _name_in_files(base: Checkpoint, layer: int) -> str:
    """Name of a layer's bias in the base's files, where it may be missing."""
    name = bias_name(base.places, layer, base.names.files)
    if name in base.names.files:
        return base.names.files[name][0]
    return f"{router_name(base, layer).rpartition('.')[0]}.{CORRECTION_BIASES[0]}"


def router_name(base: Checkpoint, layer: int) -> str:
    """Name of a layer's router weight in the files."""
    places = base.places
    return base.names.files[f"{places.backbone}.layers.{layer}.{places.router_target}"][0]


def bias_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``config.json`` that a checkpoint with a bias needs and ``config`` lacks."""
    if family.bias_export == "none":
        raise UnsupportedModelError(
            f"{family.title} cannot store a routing bias; leave it out with merge --drop-bias "
            "(routing then differs from training), or train without loss-free balancing"
        )
    if family.bias_export == "tensor":
        return {}
    if config.get("n_group", 1) not in (None, 1):
        raise UnsupportedModelError(
            f"{family.title} with n_group {config['n_group']}: a routing bias selects groups "
            "differently; leave it out with merge --drop-bias, or use a base with n_group 1"
        )
    return {key: value for key, value in _NOAUX.items() if config.get(key) != value}


def check_bias(base: Checkpoint, bias: Mapping[int, Sequence[float]]) -> None:
    """Check that ``bias`` has one finite number for each expert of its layers."""
    for layer, values in bias.items():
        experts = base.experts.get(layer)
        if experts is None:
            raise CheckpointError(
                f"routing bias: layer {layer} of {base.folder} has no experts{OTHER}"
            )
        if len(values) != experts:
            raise CheckpointError(
                f"routing bias: layer {layer} has {len(values)} values, but {base.folder} has "
                f"{experts} experts{OTHER}"
            )
        if not all(math.isfinite(value) for value in values):
            raise CheckpointError(f"routing bias: layer {layer} is not finite")


def plan_bias(
    base: Checkpoint, bias: Mapping[int, Sequence[float]] | None
) -> tuple[dict[str, tuple[str, Tensor]], dict[str, Any], list[str]]:
    """Tensors to write: name -> the base's file and values (E,); changes to config.json; notes."""
    family = base.family
    if not bias:
        return {}, {}, []
    check_bias(base, bias)
    changes = bias_config(family, base.config)
    notes: list[str] = []
    if family.bias_export == "noaux_tc":
        missing = sorted(set(base.experts) - set(bias))
        bias = {**bias, **{layer: [0.0] * base.experts[layer] for layer in missing}}
        notes = ["topk_method noaux_tc loads in vLLM; transformers' DeepseekV2 does not know it"]
    tensors: dict[str, tuple[str, Tensor]] = {}
    for layer in sorted(bias):
        name = _name_in_files(base, layer)
        if family.bias_export == "tensor" and name not in base.tensors:
            raise UnsupportedModelError(
                f"{family.title}: this checkpoint's routers have no bias ('{name}'), so it "
                "cannot store a routing bias; leave it out with merge --drop-bias"
            )
        file = base.tensors[name if name in base.tensors else router_name(base, layer)].file.name
        tensors[name] = file, torch.tensor([*map(float, bias[layer])], dtype=torch.float32)
    return tensors, changes, notes
