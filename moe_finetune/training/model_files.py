"""Training checkpoints of a model without an adapter: ordinary checkpoints, in float32.

With ``config.json``, the tokenizer and the published tensor names, any program can open one. The
weights are the trained ones, bit for bit, so a resume reads them too.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.checkpoint.fit import places_on_disk
from moe_finetune.checkpoint.naming import named_as_in
from moe_finetune.checkpoint.tensors import read_tensor
from moe_finetune.data.tokenize import as_published
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import INDEX, SINGLE, index_text, read_headers, tensors_of
from moe_finetune.io.safetensors_header import read_header
from moe_finetune.models import find_family
from moe_finetune.training.full_weights import plain_name


def write_model(model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write the checkpoint's files into ``folder``, which may contain other safetensors files."""
    getattr(model, "module", model).save_pretrained(folder, state_dict=weights)
    if not (folder / INDEX).is_file():
        # Without an index vLLM takes every safetensors file for weights.
        header = read_header(folder / SINGLE, CheckpointError)
        (folder / INDEX).write_text(index_text(header.tensors.values()), encoding="utf-8")
    if hasattr(tokenizer, "save_pretrained"):
        as_published(tokenizer).save_pretrained(folder)


class StoredWeights(Mapping[str, Tensor]):
    """``model``'s trained tensors, as stored in ``folder``; each is read on access.

    Raises:
        CheckpointError: the folder's weight files are missing or damaged.
    """

    def __init__(self, folder: Path, model: nn.Module):
        inner: Any = getattr(model, "module", model)
        self._files = tensors_of(read_headers(folder))
        state = {plain_name(k): tuple(t.shape) for k, t in inner.state_dict().items()}
        trains = {plain_name(name) for name, p in inner.named_parameters() if p.requires_grad}
        kind = inner.config.model_type
        family = find_family(kind)
        places = (
            places_on_disk(state, named_as_in(family, inner.config, self._files), inner.config)
            if family is not None
            else ((name, [(name, shape)]) for name, shape in state.items())
        )
        self._shapes = state
        self._places = {
            name: [name_on_disk for name_on_disk, _ in parts]
            for name, parts in places
            if name in trains and all(name_on_disk in self._files for name_on_disk, _ in parts)
        }

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        parts = [read_tensor(self._files[name_on_disk]) for name_on_disk in self._places[name]]
        if len(parts) == 1:
            return parts[0]
        rows, shape = torch.cat(parts), self._shapes[name]
        return rows.view(shape) if rows.numel() == math.prod(shape) else rows

    def __iter__(self) -> Iterator[str]:
        """Names of the model's tensors in the folder."""
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
