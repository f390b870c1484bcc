"""Check a merged checkpoint against base + adapter in stock transformers and PEFT.

Three checks: tensors that no adapter touches have the base's bytes; every changed tensor is the
base plus PEFT's own delta, rounded once, one matrix of a stack at a time; and the logits
of the model, or of its first layers where it is too large, are those of base + adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_finetune.checkpoint import verify_by_hand
from moe_finetune.checkpoint.adapters.files import Adapter, read_adapter
from moe_finetune.checkpoint.adapters.in_peft import peft_form
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.adapters.peft_model import LoraModule, modules_of, wrap
from moe_finetune.checkpoint.adapters.updates import OpenAdapter
from moe_finetune.checkpoint.exported_bias import plan_bias
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint
from moe_finetune.checkpoint.tensor_names import on_meta
from moe_finetune.checkpoint.verify_logits import compare_logits, layers_to_run, logits_note
from moe_finetune.checkpoint.weight_files import DTYPES, digest, read_tensor
from moe_finetune.errors import AdapterError, VerificationError, reason_of
from moe_finetune.io.checkpoint_files import tensors_of
from moe_finetune.io.counted import counted, in_number

SLACK = 2.0**-20
"""Bound on the rounding of the float32 sum itself, over the sum's largest parts."""
OFF_BY_A_STEP = 1e-3
"""Largest share of a tensor's elements that may be the other of two nearest 16-bit numbers."""


@dataclass(frozen=True)
class VerifyReport:
    """What was compared.

    Attributes:
        tensors, elements: changed tensors, or matrices of stacks, and their elements.
        off_by_a_step: elements that are the other of the two nearest numbers of the dtype.
        layers: number of layers whose logits were compared; None if they could not be.
        same: of ``tensors``, those that equal the base's: the adapter adds nothing that the dtype
            holds.
        error: norm of the logits' difference over their norm; ``moved``: of base to base + adapter.
        note: why logits say less than usual.
    """

    tensors: int
    elements: int
    off_by_a_step: int
    layers: int | None
    total_layers: int
    error: float = math.nan
    moved: float = math.nan
    note: str = ""
    same: int = 0

    def text(self) -> str:
        """What was compared, in one line."""
        are = in_number("{are} base + adapter, rounded once", self.tensors)
        line = f"{counted(self.tensors, 'changed tensor')} {are}"
        if self.same:
            line += f", {self.same} of them equal to the base's"
        if self.off_by_a_step:
            line += f" ({self.off_by_a_step} of {self.elements} elements off by one step)"
        if self.layers is not None:
            part = "logits" if self.layers == self.total_layers else f"logits after {self.layers} "
            part += "" if self.layers == self.total_layers else f"of {self.total_layers} layers"
            line += (
                f"; {part} within {self.error:.1e}, the adapter moves them by {self.moved:.1e} "
                "(both relative)"
            )
        return f"{line}; {self.note}" if self.note else line


def verify_merge(
    base: str | Path | Checkpoint,
    adapter: str | Path,
    merged: str | Path | Checkpoint,
    bias: Mapping[int, Sequence[float]] | None = None,
) -> VerifyReport:
    """Compare ``merged`` with ``base`` + ``adapter``.

    Args:
        bias: the merged routing bias by decoder layer; None if there is none or it was dropped.

    Raises:
        VerificationError: a changed tensor is not base + delta, one that no adapter changes is
            missing or differs from the base's bytes, or the logits differ; names the tensor.
    """
    opened, result = open_checkpoint(base, stored=True), open_checkpoint(merged)
    trained = open_adapter(adapter, opened, values=False)
    changed = _check_bias(opened, result, bias)
    compared = elements = off = same = 0
    for change in changes(read_adapter(adapter), trained):
        size, off_here, equal = _compare(opened, result, change)
        changed.add(change.name)
        compared += 1
        elements += size
        off += off_here
        same += equal
    _check_unchanged(opened, result, changed)
    report = VerifyReport(
        tensors=compared,
        elements=elements,
        off_by_a_step=off,
        layers=None,
        total_layers=opened.model_config.get_text_config().num_hidden_layers,
        same=same,
    )
    if result.config.get("topk_method") != opened.config.get("topk_method"):
        return replace(report, note="transformers has no class for the bias")
    layers = layers_to_run(opened)
    if layers is None:
        return replace(report, note="too large to run even the first layers")
    try:
        error, moved = compare_logits(trained, result, layers, bias)
    except AdapterError as problem:  # such as DoRA on single experts
        return replace(report, note=f"no logits: {problem}")
    except Exception as problem:  # a class may raise anything for fewer layers than it expects
        if layers == report.total_layers:
            raise
        reason = f"the first {layers} layers alone do not run ({reason_of(problem):.200})"
        return replace(report, note=f"no logits: {reason}")
    note = logits_note(result, error, moved)
    return replace(report, layers=layers, error=error, moved=moved, note=note)


@dataclass(frozen=True)
class Change:
    """The change of one tensor in the files, or of matrix ``expert`` of a stack there.

    Attributes:
        values: what is added to the base; with ``whole`` the new value itself.
        norms_O: with DoRA, the norms that the rows get.
        saved: what takes the base's place, where the adapter has the tensor and factors for it.
    """

    name: str
    expert: int | None
    values: Tensor
    norms_O: Tensor | None = None
    whole: bool = False
    saved: Tensor | None = None

    def of(self, base_OI: Tensor) -> Tensor:
        """The difference to the base's float32 values, or the new value."""
        if self.norms_O is None:
            return self.values
        new_OI = base_OI + self.values
        return (self.norms_O / torch.linalg.norm(new_OI, dim=1))[:, None] * new_OI - base_OI


def changes(stored: Adapter, adapter: OpenAdapter) -> Iterator[Change]:
    """All changes, by PEFT's own modules, which are built without weights and filled one by one.

    PEFT, not the merge, maps keys and unpacks factors; transformers, not the merge, splits the
    changes into the files' tensors. Where PEFT does not read the adapter as ``stored``,
    :mod:`by_hand` does.
    """
    base, form = adapter.base, adapter
    if adapter.of_files and not any(update.experts for update in adapter.low_rank):
        for name, values in verify_by_hand.matrices(stored):
            path = name.removesuffix(".weight")
            keys = f"{path}.lora_magnitude_vector", f"{path}.base_layer.weight"
            norms_O, saved = (
                read_tensor(stored.tensors[key]) if key in stored.tensors else None for key in keys
            )
            yield Change(name, None, values, norms_O, saved=saved)
    else:
        form = peft_form(adapter)
        with torch.device("meta"):
            wrapped = wrap(on_meta(base.model_config), form)
        modules = list(modules_of(wrapped))
        if form.tensors != stored.tensors:
            verify_by_hand.check_layer(stored, base, modules, form)
        for module in modules:
            chosen = (u.experts for u in adapter.low_rank if u.name == module.loaded)
            yield from _of_module(module, form, next(chosen, None))
    for key, info in form.tensors.items():
        if ".lora_" not in key and not key.endswith(".base_layer.weight"):
            name, value = key.replace(".base_layer.", "."), read_tensor(info)
            pieces = {name: value} if name in base.tensors else base.names.pieces(name, value)
            for piece, part in pieces.items():
                yield Change(piece, None, part, whole=True)


def _of_module(
    adapted: LoraModule, form: OpenAdapter, chosen: tuple[int, ...] | None
) -> Iterator[Change]:
    loaded, names = adapted.loaded, form.base.names
    shape = names.shapes[loaded]
    norms = form.tensors.get(f"{adapted.path}.lora_magnitude_vector")
    for expert, delta_OI in enumerate(adapted.deltas(form)):
        if getattr(adapted.module, "num_experts", 1) > 1:
            for name, piece in names.of_expert(loaded, expert, delta_OI).items():
                if names.stacked(name):
                    yield Change(name, expert, piece)
                elif chosen is None or expert in chosen:  # the others keep their bytes
                    yield Change(name, None, piece)
            continue
        spread: dict[str, Tensor] = {}
        saved_parts: dict[str, Tensor] = {}
        if (saved := form.tensors.get(f"{adapted.path}.base_layer.weight")) is not None:
            saved_parts = names.pieces(loaded, read_tensor(saved))
        if norms is not None:
            norms_OI = read_tensor(norms).float()[:, None].expand(shape)
            spread = {name: part[:, 0] for name, part in names.pieces(loaded, norms_OI).items()}
        for name, piece in names.pieces(loaded, delta_OI.view(shape)).items():
            yield Change(name, None, piece, spread.get(name), saved=saved_parts.get(name))


def _compare(base: Checkpoint, merged: Checkpoint, change: Change) -> tuple[int, int, bool]:
    """Number of elements, of those that are off by one step of a 16-bit dtype, and whether the
    change shows nowhere.
    """
    before = _read(base, change) if change.saved is None else change.saved
    after = _read(merged, change)
    delta = change.of(before.float())
    exact = delta.float() if change.whole else before.float() + delta
    slack = torch.zeros(()) if change.whole else SLACK * (
        before.float().abs() + delta.abs() + delta.abs().max()
    )  # fmt: skip
    rounded, low, high = (value.to(after.dtype) for value in (exact, exact - slack, exact + slack))
    wrong = ~((after >= low) & (after <= high))
    off = int((after != rounded).sum()) if after.dtype.itemsize == 2 else 0
    if wrong.any() or off > max(2, OFF_BY_A_STEP * after.numel()):
        count = int(wrong.sum()) or off
        largest = float((after.float() - exact).abs().max())
        raise VerificationError(
            f"{merged.folder}: '{change.name}' is not base + adapter: {count} of {after.numel()} "
            f"elements differ, by up to {largest:.1e} where the adapter changes them by up to "
            f"{float((exact - before.float()).abs().max()):.1e}; merge again, and report a bug if "
            "it persists"
        )
    return after.numel(), off, torch.equal(after, before.to(after.dtype))


def _read(checkpoint: Checkpoint, change: Change) -> Tensor:
    if checkpoint.quantized is None:
        return read_tensor(checkpoint.tensors[change.name], change.expert)
    return checkpoint.quantized.read(change.name, change.expert)


def _check_bias(
    base: Checkpoint, merged: Checkpoint, bias: Mapping[int, Sequence[float]] | None
) -> set[str]:
    """Check the routing bias that was written; return the names of its tensors."""
    values, _, _ = plan_bias(base, bias)
    stored = tensors_of(merged.files)
    for name, (_, value) in values.items():
        if name not in stored or not read_tensor(stored[name]).float().equal(value):
            raise VerificationError(
                f"{merged.folder}: '{name}' is not the routing bias; merge again"
            )
    return set(values)


def _check_unchanged(base: Checkpoint, merged: Checkpoint, changed: set[str]) -> None:
    in_merged = tensors_of(merged.files)
    for name, info in base.tensors.items():
        if name not in in_merged:
            raise VerificationError(f"{merged.folder}: tensor '{name}' of the base is missing")
        other = in_merged[name]
        if name in changed:
            continue
        same = info.shape == other.shape
        if same and base.quantized is not None and base.quantized.is_packed(name):
            for expert in range(info.shape[0]) if len(info.shape) == 3 else [None]:
                decoded = base.quantized.read(name, expert).to(DTYPES[other.dtype])
                same = same and torch.equal(decoded, read_tensor(other, expert))
        elif same and info.dtype == other.dtype:
            same = digest(info) == digest(other)
        elif same:
            cast = read_tensor(info).to(DTYPES[other.dtype])
            same = torch.equal(cast, read_tensor(other))
        if not same:
            raise VerificationError(
                f"{other.file}: '{name}' is not changed by the adapter but differs from "
                f"{info.file}; merge again"
            )
