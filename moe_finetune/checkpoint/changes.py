"""What each changed tensor must be: the base plus PEFT's own delta, one matrix at a time.

PEFT's modules are built without weights; the factors are put into one module at a time. PEFT, not
the merge, thus maps keys to parameters and unpacks the factors, and transformers, not the merge,
splits the change into the tensors of the files.

Shape legend: E experts, O rows and I columns of a matrix.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter, open_adapter
from moe_finetune.checkpoint.adapter_layout import OLD_EXPERT
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.files import read_tensor
from moe_finetune.checkpoint.names import on_meta
from moe_finetune.checkpoint.packings import as_peft
from moe_finetune.checkpoint.peft_model import LoraModule, filled, modules_of, wrap
from moe_finetune.checkpoint.updates import LowRank, read_updates


@dataclass(frozen=True)
class Change:
    """The new value of one tensor in the files, or of one matrix of a stack there.

    Attributes:
        name: the tensor in the files.
        expert: which matrix of a stack; None for the whole tensor.
        apply: from the base's float32 values to the change, so that DoRA can see the base.
        whole: the change is the new value itself.
    """

    name: str
    expert: int | None
    apply: Callable[[Tensor], Tensor]
    whole: bool = False


class Changes:
    """All changes that an adapter makes to a base, by PEFT.

    Attributes:
        names: names of all tensors that change.
    """

    def __init__(self, adapter: Adapter, base: Checkpoint):
        self.names: set[str] = set()
        self._base, self._scratch = base, tempfile.TemporaryDirectory()
        self.layout = base.names
        self._adapter = adapter
        self._modules: list[LoraModule] = []
        self._matrix_updates: list[LowRank] = []
        if any(map(OLD_EXPERT.fullmatch, adapter.tensors)):
            self._matrix_updates = read_updates(adapter, base).low_rank
            return
        folder = as_peft(adapter, base, Path(self._scratch.name) / "adapter")
        if folder != adapter.folder:
            self._adapter = open_adapter(folder)
        with torch.device("meta"):
            self._modules = list(modules_of(wrap(on_meta(base.model_config), self._adapter)))

    @torch.no_grad()
    def __iter__(self) -> Iterator[Change]:
        for module in self._modules:
            with filled(self._adapter, module):
                yield from self._of_module(module)
        yield from self._matrices()
        for key, info in self._adapter.tensors.items():
            if ".lora_" not in key:
                yield from self._saved(key.replace(".base_layer.", "."), read_tensor(info))

    def _of_module(self, adapted: LoraModule) -> Iterator[Change]:
        loaded, module = adapted.loaded, adapted.module
        stored, shape = self._adapter.tensors, self.layout.shapes[loaded]
        if len(shape) == 3 and getattr(module, "num_experts", 1) > 1:
            lhs, rhs, scale = module.get_delta_factors("default")
            yield from self._of_stack(loaded, lambda e: (lhs[e] @ rhs[e]) * scale, shape[0])
            return
        if hasattr(module, "parameter_name"):  # PEFT would move the product to the base's device
            a, b = (getattr(module, f"lora_{f}")["default"].weight for f in "AB")
            delta = (b @ a) * module.scaling["default"]
        else:
            delta = module.get_delta_weight("default")
        norms = stored.get(f"{adapted.path}.lora_magnitude_vector")
        pieces = self.layout.pieces(loaded, delta.view(shape))
        spread: dict[str, Tensor] = {}
        if norms is not None:
            norms_OI = read_tensor(norms).float()[:, None].expand(shape)
            spread = self.layout.pieces(loaded, norms_OI)
        for name, piece in pieces.items():
            self.names.add(name)
            yield Change(name, None, _change(piece, spread[name][:, 0] if norms else None))

    def _of_stack(
        self, loaded: str, delta_OI: Callable[[int], Tensor], experts: int
    ) -> Iterator[Change]:
        for names in self.layout.names_of_experts(loaded):
            self.names.update(names)
        for expert in range(experts):
            for name, piece in self.layout.of_expert(loaded, expert, delta_OI(expert)).items():
                index = expert if self.layout.stacked(name) else None
                yield Change(name, index, _change(piece, None))

    def _saved(self, key: str, value: Tensor) -> Iterator[Change]:
        """A tensor that trained in full, under its name in the model or in the files."""
        if key in self._base.tensors:
            self.names.add(key)
            yield Change(key, None, _change(value, None), whole=True)
            return
        for name, piece in self.layout.pieces(key, value).items():
            self.names.add(name)
            yield Change(name, None, _change(piece, None), whole=True)

    def _matrices(self) -> Iterator[Change]:
        """Adapters of transformers 4, whose modules are the matrices of the files."""
        stored = self._adapter.tensors
        for update in self._matrix_updates:
            a, b = (read_tensor(stored[key]).float() for key in (update.a, update.b))
            norms_O = read_tensor(stored[update.magnitude]).float() if update.magnitude else None
            self.names.add(update.name)
            yield Change(update.name, None, _change((b @ a) * update.scale, norms_O))


def _change(delta_OI: Tensor, norms_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A fixed change; with DoRA one of a matrix whose rows get the norms ``norms_O``."""

    def of(base_OI: Tensor) -> Tensor:
        if norms_O is None:
            return delta_OI
        new_OI = base_OI + delta_OI
        return (norms_O / torch.linalg.norm(new_OI, dim=1))[:, None] * new_OI - base_OI

    return of
