"""Merge adapters into a base checkpoint: plan, check, apply, without building the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_finetune.checkpoint.adapter import Adapter, open_adapter
from moe_finetune.checkpoint.adapter_metadata import read_metadata
from moe_finetune.checkpoint.card import CARD_FILE, is_hub_id, model_card, public_name
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.merge_plan import MergePlan, plan_merge
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.errors import CheckpointError
from moe_finetune.io import check_output, one_writer

if TYPE_CHECKING:
    from torch import Tensor

    from moe_finetune.checkpoint.files import Content
    from moe_finetune.checkpoint.requantized import Requantization, Sums
    from moe_finetune.io.safetensors_header import TensorInfo

Progress = Callable[[int, int], None]
Form = Literal["float", "base"]


@dataclass(frozen=True)
class MergeReport:
    """What a merge did (or, with ``dry_run``, would do).

    Attributes:
        changed, copied: number of tensors that an adapter or bias changes, and that are copied
            unchanged.
        bytes_written: size of the output in bytes.
        seconds: wall time of planning and writing.
        requantized: the error of storing the result in the base's quantized format; None for
            floats.
    """

    output: Path
    plan: MergePlan
    dry_run: bool
    changed: int
    copied: int
    bytes_written: int
    seconds: float
    requantized: Requantization | None = None


@one_writer
def merge_adapter(
    base: str | Path | Checkpoint,
    adapter: str | Path,
    output: str | Path,
    dtype: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    bias: Mapping[int, Sequence[float]] | None = None,
    progress: Progress | None = None,
    format: Form = "float",
) -> MergeReport:
    """Write ``base + adapter`` as an ordinary checkpoint with the base's names, files and config.

    Memory does not grow with the checkpoint: a few tens of megabytes per thread plus one layer's
    factors, or in a quantized format a few copies of one matrix per thread. The output appears
    complete or not at all.

    Args:
        adapter: adapter folder.
        dtype: "float32", "float16", "bfloat16", or None to keep each tensor's stored dtype.
        dry_run: only plan and check; ``report.plan.text()`` shows what would be done.
        bias: loss-free routing bias by decoder layer, a number per expert, written where the family
            stores it. Without it the output keeps the base's.
        progress: called with (bytes done, total bytes).
        format: "float", or "base" to also accept a quantized base and keep its format: changed
            tensors are requantized, all others keep their bytes.

    Raises:
        CheckpointError, AdapterError, UnsupportedModelError: see :func:`plan_merge`.
        OutputExistsError, OutputBusyError, DiskSpaceError: before anything is written.
        NumericsError: a value does not fit into ``dtype``, or is not finite after the merge.
    """
    from moe_finetune.checkpoint.gate import check_belongs

    started = time.perf_counter()
    output = Path(output)
    check_output(output, overwrite)
    opened = open_checkpoint(base, stored=format == "base")
    trained = open_adapter(adapter)
    plan = plan_merge(opened, trained, dtype, bias)
    check_belongs(trained, opened)
    plan.small_files[CARD_FILE] = _card(opened, trained).encode()
    requantized = None
    if not dry_run:
        sums: dict[str, Sums] = {}
        apply_plan(plan, output, overwrite, progress, sums)
        if opened.quantized is not None:
            from moe_finetune.checkpoint.requantized import Requantization

            requantized = Requantization.of(opened.quantized.format, sums)
    return MergeReport(
        output=output,
        plan=plan,
        dry_run=dry_run,
        changed=len(plan.changed),
        copied=sum(tensor.copied for tensor in plan.tensors.values()),
        bytes_written=0 if dry_run else plan.size,
        seconds=time.perf_counter() - started,
        requantized=requantized,
    )


def _card(base: Checkpoint, adapter: Adapter) -> str:
    """The export's model card, from the adapter's own notes on its training."""
    training = read_metadata(adapter.folder).extra
    named = adapter.config.get("base_model_name_or_path")
    hub = named if named and is_hub_id(named) else None
    method = str(training["method"]) if training.get("method") else None
    return model_card(
        hub or base.folder,
        f"{public_name(hub or base.folder)}, fine-tuned" + (f" with {method}" if method else ""),
        method=method,
        data=list(dict.fromkeys(map(str, training.get("data") or ()))),
        folder=base.folder,
    )


def apply_plan(
    plan: MergePlan,
    output: Path,
    overwrite: bool = False,
    progress: Progress | None = None,
    sums: dict[str, Sums] | None = None,
) -> None:
    """Carry out ``plan``; ``sums`` receives the error sums of each requantized tensor, by name."""
    from moe_finetune.checkpoint.compute import Factors, Merged
    from moe_finetune.checkpoint.files import check_values, copy_of, write_checkpoint
    from moe_finetune.checkpoint.requantized import Requantized

    sums = {} if sums is None else sums
    replaced = [t.source for t in plan.tensors.values() if t.value is not None and t.source]
    check_values(replaced, CheckpointError)
    factors = Factors(plan.adapter)
    contents: dict[str, Content] = {}
    for name, tensor in plan.tensors.items():
        if tensor.value is not None:
            contents[name] = partial(_literal, tensor.value)
        elif tensor.copied and tensor.source is not None:
            contents[name] = copy_of(tensor.source)
        else:
            merged = Merged(tensor, factors)
            contents[name] = merged
            if tensor.float_name is not None and plan.base.quantized is not None:
                contents[name] = Requantized(merged, plan.base.quantized, sums)
    write_checkpoint(output, plan.files, contents, plan.small_files, overwrite, progress)


def _literal(value: bytes, _target: TensorInfo) -> Iterator[Tensor]:
    import torch

    yield torch.frombuffer(bytearray(value), dtype=torch.uint8)
