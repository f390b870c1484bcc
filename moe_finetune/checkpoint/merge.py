"""Merge adapters into a base checkpoint: plan, check, apply, without building the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    from moe_finetune.checkpoint.requantized import Requantization, Sums
    from moe_finetune.checkpoint.writer import Content

AdapterPath = str | Path
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
        delta_norms: Frobenius norm of the float32 change of each changed tensor.
        expert_norms: the same for each routed expert (gate, up and down together), by layer.
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
    delta_norms: dict[str, float] = field(default_factory=dict)
    expert_norms: dict[int, list[float]] = field(default_factory=dict)
    requantized: Requantization | None = None


@one_writer
def merge_adapter(
    base: str | Path | Checkpoint,
    adapter: AdapterPath | Sequence[tuple[AdapterPath, float]],
    output: str | Path,
    dtype: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    bias: Mapping[int, Sequence[float]] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    format: Form = "float",
) -> MergeReport:
    """Write ``base + adapter`` as an ordinary checkpoint with the base's names, files and config.

    Memory does not grow with the checkpoint: a few tens of megabytes per thread plus one layer's
    factors, or in a quantized format a few copies of one matrix per thread. The output appears
    complete or not at all.

    Args:
        adapter: adapter folder, or (folder, weight) pairs whose changes are summed.
        dtype: "float32", "float16", "bfloat16", or None to keep each tensor's stored dtype.
        dry_run: only plan and check; ``report.plan.table()`` shows what would be done.
        bias: loss-free routing bias by decoder layer, a number per expert, written where the family
            stores it. Without it the output keeps the base's.
        progress: called with (bytes done, total bytes).
        workers: threads; by default one per core, at most 8, plus two that wait for the disk.
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
    pairs = [(adapter, 1.0)] if isinstance(adapter, str | Path) else list(adapter)
    adapters = [(open_adapter(path), float(weight)) for path, weight in pairs]
    plan = plan_merge(opened, adapters, dtype, bias)
    for opened_adapter, _ in adapters:
        check_belongs(opened_adapter, opened)
    plan.small_files[CARD_FILE] = _card(opened, adapters).encode()
    norms: dict[str, float] = {}
    requantized = None
    if not dry_run:
        sums: dict[str, Sums] = {}
        norms = apply_plan(plan, output, overwrite, progress, workers, sums)
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
        delta_norms={name: norm for name, norm in norms.items() if not name.endswith("]")},
        expert_norms=_expert_norms(opened, norms),
        requantized=requantized,
    )


def _card(base: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> str:
    """The export's model card, from the adapters' own notes on their training."""
    trainings = [read_metadata(adapter.folder).extra for adapter, _ in adapters]
    methods = dict.fromkeys(str(extra["method"]) for extra in trainings if extra.get("method"))
    named = adapters[0][0].config.get("base_model_name_or_path") if adapters else None
    hub = named if named and is_hub_id(named) else None
    method = ", ".join(methods) or None
    return model_card(
        hub or base.folder,
        f"{public_name(hub or base.folder)}, fine-tuned" + (f" with {method}" if method else ""),
        method=method,
        data=list(
            dict.fromkeys(str(name) for extra in trainings for name in extra.get("data") or ())
        ),
        folder=base.folder,
    )


def apply_plan(
    plan: MergePlan,
    output: Path,
    overwrite: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
    sums: dict[str, Sums] | None = None,
) -> dict[str, float]:
    """Carry out ``plan`` and return the Frobenius norm of each changed tensor's change.

    For an expert stack each expert's norm is also returned, under ``name[expert]``. ``sums``
    receives the error sums of each requantized tensor, by name.
    """
    from moe_finetune.checkpoint.compute import Factors, Merged
    from moe_finetune.checkpoint.requantized import Requantized
    from moe_finetune.checkpoint.values import check_values
    from moe_finetune.checkpoint.writer import Copy, Literal, write_checkpoint

    sums = {} if sums is None else sums
    replaced = [t.source for t in plan.tensors.values() if t.value is not None and t.source]
    check_values(replaced, CheckpointError)
    factors = Factors(plan.adapters)
    norms: dict[str, float] = {}
    contents: dict[str, Content] = {}
    for name, tensor in plan.tensors.items():
        if tensor.value is not None:
            contents[name] = Literal(tensor.value)
        elif tensor.copied and tensor.source is not None:
            contents[name] = Copy(tensor.source)
        else:
            merged = Merged(tensor, factors, norms)
            contents[name] = merged
            if tensor.float_name is not None and plan.base.quantized is not None:
                contents[name] = Requantized(merged, plan.base.quantized, sums)
    with _one_thread_each():
        write_checkpoint(
            output, plan.files, contents, plan.small_files, overwrite, progress, workers
        )
    order = {name: position for position, name in enumerate(plan.base.tensors)}
    return dict(sorted(norms.items(), key=lambda item: order.get(item[0], len(order))))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit torch to one thread per worker, and restore its threads afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _expert_norms(base: Checkpoint, norms: Mapping[str, float]) -> dict[int, list[float]]:
    disk = base.family.disk
    by_layer: dict[int, list[float]] = {}
    for layer, experts in base.experts.items():
        parts = [
            [
                norms.get(disk.name(part, layer, expert) + (f"[{expert}]" if disk.fused else ""))
                for parameter in base.family.expert_parameters
                for part in disk.parts(parameter)
            ]
            for expert in range(experts)
        ]
        if any(norm is not None for expert in parts for norm in expert):
            by_layer[layer] = [math.hypot(*(norm or 0.0 for norm in expert)) for expert in parts]
    return by_layer
