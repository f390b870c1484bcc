"""Load a checkpoint with each rank reading only its part of the routed experts.

``from_pretrained`` of transformers 5.19 shards while it reads, but refuses a plan of
``ep_dispatch_experts`` with attention left whole: it requires ``ep_size == tp_size``. A subclass
with the model's name replaces two of its steps, the choice of the mesh and the placement of
parameters before they are read. A rank then reads only its experts' tensors.
"""

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers.distributed import DistributedConfig

from moe_finetune.moe.large.spread_experts import place_experts


def load_spread(
    model_class: Any, ranks: int, folder: Path, device_map: Any = None, **options: Any
) -> Any:
    """``model_class.from_pretrained(...)`` with its routed experts spread over ``ranks`` ranks.

    Every rank of the run must call this. ``device_map`` None means this process's device.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def prepare(cls: Any, config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        return config, device_map, None

    def place(cls: Any, model: nn.Module, config: Any, mesh: Any) -> Any:
        return place_experts(model, ranks, device.type)

    methods = {
        "prepare_distribute_model": classmethod(prepare),
        "maybe_distribute_model": classmethod(place),
        "__module__": model_class.__module__,
    }
    spread_class: Any = type(model_class.__name__, (model_class,), methods)
    spread = DistributedConfig(fsdp_size=distributed.get_world_size(), ep_size=ranks)
    model, report = spread_class.from_pretrained(
        folder, distributed_config=spread, device_map=device_map or {"": device}, **options
    )
    model.__class__ = model_class
    del model.config.distributed_config
    return model, report
