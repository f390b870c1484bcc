"""Check a merged checkpoint against base + adapter in stock transformers and PEFT.

Models that fit into memory are compared by their logits, larger ones by sampled tensors. In both
cases every tensor that no adapter touches must have the base's bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter, open_adapter
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.merge_plan import plan_merge
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.checkpoint.reference import compare_logits
from moe_finetune.checkpoint.sampled import compare_tensors
from moe_finetune.checkpoint.updates import Replace
from moe_finetune.checkpoint.values import digest
from moe_finetune.errors import CheckpointError, NumericsError
from moe_finetune.io.checkpoint_files import tensors_of
from moe_finetune.io.safetensors_header import FLOATS

# Bound on the logits' relative error (norm of the difference over the norm) by the coarsest stored
# dtype; rounding the weights moves logits by a few of its steps.
LOGIT_TOLERANCE = {"F64": 1e-4, "F32": 1e-4, "F16": 2e-2, "BF16": 5e-2}
# Bound on one element's error over the tensor's largest element: one rounding.
TENSOR_TOLERANCE = {"F64": 1e-6, "F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}
# Bound on a requantized tensor's error norm over its change's norm: it must be no further from
# base + adapter than the base itself, except for rounding in float32.
REQUANTIZED_TOLERANCE = 1.0 + 1e-3


@dataclass(frozen=True)
class VerifyReport:
    """What was compared, and the largest difference.

    Attributes:
        mode: "logits" (whole models) or "tensors" (sampled layers).
        max_abs: largest absolute difference of a logit or of a merged tensor's element.
        max_rel: the measured relative error that ``tolerance`` bounds: relative to the logits'
            norm, to a tensor's largest element, or, if the merge is stored quantized, to the norm
            of a tensor's change.
        tolerance: the bound on ``max_rel``.
        compared: number of prompts, or names of the compared tensors.
        checksums: SHA-256 of every tensor that the merge did not change, equal in base and merged.
    """

    mode: Literal["logits", "tensors"]
    max_abs: float
    max_rel: float
    tolerance: float
    compared: int | tuple[str, ...]
    checksums: dict[str, str] = field(default_factory=dict, repr=False)


def verify_merge(
    base: str | Path | Checkpoint,
    adapter: str | Path | Adapter | Sequence[tuple[str | Path, float]],
    merged: str | Path | Checkpoint,
    prompts: Sequence[str] | None = None,
    bias: Mapping[int, Sequence[float]] | None = None,
    mode: Literal["auto", "logits", "tensors"] = "auto",
    tolerance: float | None = None,
    samples: int = 12,
    seed: int = 0,
) -> VerifyReport:
    """Compare ``merged`` with ``base`` + ``adapter``.

    Args:
        adapter: open adapter, its folder, or the (folder, weight) pairs that were merged.
        prompts: texts for the logits; by default random token ids, fixed by ``seed``.
        bias: the merged routing bias by decoder layer; None if there is none or it was dropped.
        mode: "auto" compares logits if a float32 model fits into 60 % of the free memory and
            transformers can run both sides (not with several saved modules or ``noaux_tc``).
        tolerance: bound on the relative error; by default that of the merged dtype.
        samples: modules to compare in mode "tensors", spread over layers and kinds.
        seed: chooses the samples and the random token ids.

    Raises:
        NumericsError: the difference exceeds the tolerance; names the worst tensor if known.
        CheckpointError: a tensor that no adapter changes is missing or differs from the base's
            bytes.
    """
    single = isinstance(adapter, str | Path | Adapter)
    pairs: Any = [(adapter, 1.0)] if single else adapter
    opened, result = open_checkpoint(base, stored=True), open_checkpoint(merged, stored=True)
    adapters = [(open_adapter(path), float(weight)) for path, weight in pairs]
    plans = plan_merge(opened, adapters, bias=bias).changed
    sums = _checksums(opened, result, {plan.target.name for plan in plans})
    if result.quantized is not None:
        mode = "tensors"  # no bound is known for how far requantizing moves logits
    kinds = {info.dtype for info in result.tensors.values() if info.dtype in FLOATS}
    coarsest = next(kind for kind in ("BF16", "F16", "F32", "F64") if kind in kinds)
    if mode == "auto":
        saved = any(isinstance(update, Replace) for plan in plans for update in plan.updates)
        unweighted = len(adapters) == 1 and adapters[0][1] == 1.0
        runs = result.config.get("topk_method") == opened.config.get("topk_method")
        mode = "logits" if runs and (unweighted or not saved) and fits(opened) else "tensors"
    if mode == "logits":
        ids = _token_ids(opened, prompts, seed)
        bound = LOGIT_TOLERANCE[coarsest] if tolerance is None else tolerance
        max_abs, max_rel = compare_logits(opened, adapters, result, ids, bias)
        if not max_rel <= bound:
            raise NumericsError(
                f"{result.folder}: logits differ from base + adapter by {max_rel:.2e} (relative; "
                f"largest {max_abs:.2e}), the tolerance is {bound:.0e}; merge again, and report "
                "a bug if it persists"
            )
        return VerifyReport("logits", max_abs, max_rel, bound, len(ids), sums)
    bound = TENSOR_TOLERANCE[coarsest] if tolerance is None else tolerance
    if result.quantized is not None:
        bound = REQUANTIZED_TOLERANCE
    errors = compare_tensors(opened, adapters, result, samples, seed)
    worst = max(errors, key=lambda name: errors[name][1])
    max_abs, max_rel = max(e[0] for e in errors.values()), errors[worst][1]
    if not max_rel <= bound:
        raise NumericsError(
            f"{result.folder}: '{worst}' differs from base + adapter by {max_rel:.2e} of "
            f"{'the change' if result.quantized is not None else 'its largest element'}, the "
            f"tolerance is {bound:.0e}; merge again, and report a bug if it persists"
        )
    return VerifyReport("tensors", max_abs, max_rel, bound, tuple(errors), sums)


def _checksums(base: Checkpoint, merged: Checkpoint, changed: set[str]) -> dict[str, str]:
    sums = {}
    in_merged = tensors_of(merged.files)
    for name, info in tensors_of(base.files).items():
        if name not in in_merged:
            raise CheckpointError(f"{merged.folder}: tensor '{name}' of the base is missing")
        other = in_merged[name]
        if name in changed or (info.dtype, info.shape) != (other.dtype, other.shape):
            continue
        sums[name] = digest(info).hexdigest()
        if digest(other).hexdigest() != sums[name]:
            raise CheckpointError(
                f"{other.file}: '{name}' is not changed by the adapter but differs from "
                f"{info.file}; merge again"
            )
    return sums


def fits(base: Checkpoint) -> bool:
    """Return whether a float32 model takes less than 60 % of the free memory."""
    import psutil

    elements = sum(torch.Size(info.shape).numel() for info in base.tensors.values())
    return 4 * elements < 0.6 * psutil.virtual_memory().available


def _token_ids(base: Checkpoint, prompts: Sequence[str] | None, seed: int) -> list[Tensor]:
    if prompts:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(base.folder)
        return [tokenizer(text, return_tensors="pt")["input_ids"] for text in prompts]
    return random_tokens(base, seed)


def random_tokens(base: Checkpoint, seed: int) -> list[Tensor]:
    """Three rows of random token ids from the base's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    size = base.model_config.get_text_config().vocab_size
    return [torch.randint(size, (1, length), generator=generator) for length in (7, 16, 33)]
