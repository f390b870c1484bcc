"""An expert-selective adapter as an ordinary one: zero factors for the experts that have none."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from moe_finetune.checkpoint.adapter import CONFIG, PREFIX, WEIGHTS, open_adapter
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.checkpoint.resolve import resolve
from moe_finetune.checkpoint.tensors import read_tensor
from moe_finetune.checkpoint.updates import LowRank


def expand_selection(adapter: str | Path, base: str | Path, output: str | Path) -> Path:
    """Write ``adapter`` with factors for every expert of every layer, for plain PEFT to load.

    Layers without chosen experts get zero factors too, since PEFT targets a parameter in all
    layers. An adapter without a selection is written as it is.

    Raises:
        AdapterError, CheckpointError: as for a merge.
    """
    opened, checkpoint = open_adapter(adapter), open_checkpoint(base)
    updates = [u for _, u in resolve(opened, checkpoint) if isinstance(u, LowRank)]
    tensors = {key: read_tensor(info) for key, info in opened.tensors.items()}
    family, selection = checkpoint.family, opened.metadata.experts
    if selection is not None:
        experts = f".{family.experts_path}."
        packed = {
            key: (update.rank, key == update.a)
            for update in updates
            if experts in update.a
            for key in (update.a, update.b)
        }
        for key, (rank, is_a) in packed.items():
            head, _, tail = key.partition(experts)
            stack, _, layer = head.rpartition(".")
            total = checkpoint.experts[int(layer)]
            tensors[key] = _spread(tensors[key], selection[int(layer)], total, rank, is_a)
            for other in set(checkpoint.experts) - set(selection):
                name = f"{stack}.{other}{experts}{tail}"
                tensors.setdefault(name, torch.zeros_like(tensors[key]))
    from safetensors.torch import save_file

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(opened.config, indent=2), encoding="utf-8")
    return folder


def _spread(
    packed: torch.Tensor, chosen: tuple[int, ...], experts: int, rank: int, is_a: bool
) -> torch.Tensor:
    """PEFT's packing for ``chosen`` -> the same for all ``experts``, zeros elsewhere."""
    places = list(chosen)
    if is_a:
        full = packed.new_zeros(experts, rank, packed.shape[1])
        full[places] = packed.view(len(places), rank, -1)
        return full.view(experts * rank, -1)
    full = packed.new_zeros(packed.shape[0], rank, experts)
    full[:, :, places] = packed.view(packed.shape[0], rank, len(places))
    return full.view(packed.shape[0], rank * experts)
