"""The tensors of a checkpoint's files as floats, dequantized when they are read if necessary."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.weight_files import DAMAGED, finite, not_finite, read_tensor
from moe_finetune.errors import CheckpointError
from moe_finetune.io.check_config import QUANTIZATION
from moe_finetune.io.safetensors_header import Header, TensorInfo, build_header
from moe_finetune.quantization.formats import Format


class QuantizedTensors:
    """A quantized checkpoint's tensors, dequantized when they are read.

    ``tensors``: as in an unquantized checkpoint, but for their offsets.
    """

    def __init__(self, stored: Mapping[str, TensorInfo], form: Format):
        self._form = form
        self._parts: dict[str, list[TensorInfo]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        _, *others = form.suffixes
        parts: set[str] = set()
        for name in stored:
            suffix = next((s for s in form.suffixes if name.endswith(s)), None)
            if suffix is None or name in parts:
                continue
            stem = name.removesuffix(suffix)
            lonely = not any(f"{stem}{s}" in stored for s in others)
            if suffix == form.of and lonely and stored[name].dtype not in form.dtypes[0]:
                continue  # a tensor that the format leaves unquantized
            float_name = f"{stem}{form.of}"
            infos = form.parts(float_name, stored)
            parts.update(part.name for part in infos)
            self._parts[float_name] = infos
            shape = form.shape(infos, read_tensor)
            self.tensors[float_name] = replace(
                infos[0], name=float_name, dtype="BF16", shape=shape, size=2 * math.prod(shape)
            )
        if not parts:
            raise CheckpointError(
                f"config.json: {QUANTIZATION} is {form.name}, but no tensor is stored that way; "
                "copy the files of this checkpoint, or remove the key"
            )
        for name, info in stored.items():
            if name not in parts:
                self._parts[name] = [info]
                self.tensors[name] = info

    @property
    def format(self) -> str:
        return self._form.name

    def stored(self, name: str) -> list[TensorInfo]:
        """The tensors in the files that make up ``name``."""
        return self._parts[name]

    def is_packed(self, name: str) -> bool:
        """Whether the tensor ``name`` is stored quantized."""
        return len(self._parts[name]) > 1

    def decoded(self, files: Mapping[str, Header]) -> dict[str, Header]:
        """Headers with a float tensor for each packed one, in the file of its packed values."""
        whole = {parts[0].name: name for name, parts in self._parts.items()}
        headers = {}
        for file, header in files.items():
            infos = [self.tensors[whole[name]] for name in header.tensors if name in whole]
            layout = [(info.name, info.dtype, info.shape) for info in infos]
            headers[file] = build_header(header.file, layout, header.metadata or None)
        return headers

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor, or one matrix of a stack, in float32 if it is stored quantized."""
        return self.values(name, self.read_parts(name, expert))

    def read_parts(self, name: str, expert: int | None = None) -> list[Tensor]:
        """The stored parts in their own dtypes, or those of one matrix of a stack."""
        return [read_tensor(part, expert) for part in self._parts[name]]

    def slices(self, dtype: torch.dtype) -> dict[str, Any]:
        """All tensors by name, each decoded when ``from_pretrained`` reads it for ``dtype``."""
        return {name: _Slice(self, name, dtype) for name in self.tensors}

    def values(self, name: str, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        file = self._parts[name][0].file
        try:
            values = self._form.values(parts)
        except ValueError as problem:
            raise CheckpointError(f"{file}: '{name}' {problem}; {DAMAGED}") from None
        if not finite(values):
            raise CheckpointError(not_finite(file, name))
        return values


@dataclass(frozen=True)
class _Slice:
    """A tensor of the files in the form in which transformers takes safetensors' slices."""

    stored: QuantizedTensors
    name: str
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.stored.tensors[self.name].shape)

    def __getitem__(self, index: Any) -> Tensor:
        shape = self.stored.tensors[self.name].shape
        if len(shape) != 3:
            return self._checked(self.stored.read(self.name))[index]
        stack = torch.empty(shape, dtype=self.dtype)
        for expert in range(shape[0]):  # decoded values take twice the memory of most dtypes
            stack[expert] = self._checked(self.stored.read(self.name, expert))
        return stack[index]

    def _checked(self, values: Tensor) -> Tensor:
        if values.is_floating_point() and not finite(values.to(self.dtype)):
            dtype = str(self.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"'{self.name}' has values that overflow {dtype}; use a wider model.dtype"
            )
        return values
