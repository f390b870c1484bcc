"""Compare a merged checkpoint with the quantized model that its adapter was trained on.

The adapter was trained on quantized weights and is merged into unquantized ones, so the logits
differ by the quantization error. That error is measured on the base without an adapter, on the same
tokens. The merge may differ by ``FACTOR`` times as much; a wrong merge differs by more.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapter import Adapter, open_adapter
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.loading import load_model
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.checkpoint.reference import apply_adapters, load, logits_of
from moe_finetune.checkpoint.verify import fits, random_tokens
from moe_finetune.errors import NumericsError
from moe_finetune.quantization.codec import Kind, check_kind

FACTOR = 2.0


@dataclass(frozen=True)
class QuantizedReport:
    """Relative differences of logits: norm of the difference over the norm.

    Attributes:
        kind: the number format that the adapter was trained with.
        base: of the quantized base to the base: the quantization error.
        merged: of the merged checkpoint to the quantized base + adapter.
        tolerance: the bound on ``merged``, ``FACTOR`` x ``base``.
    """

    kind: Kind
    base: float
    merged: float
    tolerance: float

    def text(self) -> str:
        return (
            f"against the {self.kind} base + adapter that was trained: logits within "
            f"{self.merged:.1e}, bound {self.tolerance:.1e} ({FACTOR:g} x the {self.base:.1e} by "
            f"which {self.kind} moves the base)"
        )


def trained_with(adapter: Adapter) -> Kind | None:
    """The number format of the base during the adapter's training; None if unquantized."""
    return check_kind(adapter.metadata.extra.get("quantization"), f"{adapter.folder}: quantization")


def verify_quantized(
    base: str | Path | Checkpoint,
    adapter: str | Path | Adapter,
    merged: str | Path | Checkpoint,
    bias: Mapping[int, Sequence[float]] | None = None,
) -> QuantizedReport | None:
    """Compare ``merged`` with the quantized base + ``adapter`` in float32, one model at a time.

    Returns None if the adapter was trained on an unquantized base, or if a float32 model does not
    fit into 60 % of the free memory.

    Raises:
        NumericsError: the two differ by more than the tolerance.
    """
    opened, trained = open_checkpoint(base), open_adapter(adapter)
    kind = trained_with(trained)
    if kind is None or not fits(opened):
        return None
    ids = random_tokens(opened, 0)
    plain = logits_of(load(opened), ids, opened, bias)
    rounded = logits_of(_quantized(opened, kind), ids, opened, bias)
    with tempfile.TemporaryDirectory() as scratch:
        model = apply_adapters(_quantized(opened, kind), opened, [(trained, 1.0)], Path(scratch))
        adapted = logits_of(model, ids, opened, bias)
        del model
    result = open_checkpoint(merged)
    merged_logits = logits_of(load(result), ids)
    shift, difference = _relative(rounded, plain), _relative(merged_logits, adapted)
    report = QuantizedReport(kind, shift, difference, FACTOR * shift)
    if not difference <= report.tolerance:
        raise NumericsError(
            f"{result.folder}: {report.text()}: outside the bound; merge again, and report a bug "
            "if it persists"
        )
    return report


def _quantized(base: Checkpoint, kind: Kind) -> Any:
    return load_model(base, dtype="float32", device_map="cpu", quantization=kind)


def _relative(logits: list[Tensor], reference: list[Tensor]) -> float:
    one, other = torch.cat([f[0] for f in logits]), torch.cat([w[0] for w in reference])
    return float((one - other).norm() / other.norm())
