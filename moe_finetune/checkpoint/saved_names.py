"""Make a model's own ``save_pretrained`` write the names of the checkpoint that it came from.

transformers reverts its renaming on loading pattern by pattern. Where two published names have the
same loaded one, such as ``mlp`` of dense and ``block_sparse_moe`` of MoE layers, it writes one of
them for both, and programs that read the release's names find nothing.
"""

from collections.abc import Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_finetune.checkpoint.open import Checkpoint


def keep_names(model: Any, checkpoint: Checkpoint) -> None:
    """From now on, ``model.save_pretrained`` writes the tensor names of ``checkpoint``.

    Tensors that the checkpoint's model does not have, such as a learned bias, keep their names. A
    model whose weights are not all in memory is saved by transformers.
    """
    # On the instance, which FSDP2 keeps although it changes the class.
    if "save_pretrained" not in model.__dict__:
        original = model.save_pretrained
        model.__dict__["save_pretrained"] = wraps(original)(
            partial(_save, model, checkpoint, original)
        )


def _save(
    model: nn.Module,
    checkpoint: Checkpoint,
    original: Any,
    save_directory: str | Path,
    *args: Any,
    state_dict: Mapping[str, Tensor] | None = None,
    save_original_format: bool = True,
    **kwargs: Any,
) -> Any:
    state = dict(model.state_dict() if state_dict is None else state_dict)
    values = [value for value in state.values() if isinstance(value, Tensor)]
    # An adapter added by transformers' own integration, and offloaded or spread weights, are its.
    in_memory = len(values) == len(state) and not any(
        value.is_meta or hasattr(value, "device_mesh") for value in values
    )
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    if not save_original_format or not in_memory or adapted or kwargs.get("distributed_checkpoint"):
        kwargs |= {"state_dict": state_dict, "save_original_format": save_original_format}
        return original(save_directory, *args, **kwargs)
    tensors = checkpoint.names.in_files(state)
    return original(save_directory, *args, state_dict=tensors, save_original_format=False, **kwargs)
