"""A merged checkpoint's logits against those of base + adapter in transformers and PEFT."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.adapters.updates import OpenAdapter
from moe_finetune.checkpoint.load_model import without_bar
from moe_finetune.checkpoint.open import Checkpoint, only_weights
from moe_finetune.errors import AdapterError, VerificationError, is_machine_failure, reason_of
from moe_finetune.models.class_structure import class_of, meta_model
from moe_finetune.models.family import CORRECTION_BIASES
from moe_finetune.models.small_configs import first_layers, of_first_layers
from moe_finetune.moe.recorder.observe import undisturbed

NEARER = 10.0
"""How much nearer the merged logits must be to base + adapter than to the base."""
# Where they are not: bound on the logits' relative error by the coarsest stored dtype, since
# rounding the weights moves logits by a few of its steps.
LOGIT_TOLERANCE = {"F64": 1e-4, "F32": 1e-4, "F16": 2e-2, "BF16": 5e-2}


def layers_to_run(base: Checkpoint) -> int | None:
    """All layers if a float32 model takes less than 60 % of the free memory, else the first."""
    import psutil

    free = 0.6 * psutil.virtual_memory().available
    total = base.model_config.get_text_config().num_hidden_layers
    sizes = {name: torch.Size(info.shape).numel() for name, info in base.tensors.items()}
    if 4 * sum(sizes.values()) < free:
        return total
    layers = first_layers(base.model_config, base.places.moe_layers[0])
    outside = re.compile(rf"(?:^|\.)layers\.({'|'.join(map(str, range(layers, total)))})\.")
    first = sum(size for name, size in sizes.items() if not outside.search(name))
    # PEFT adds a whole stack's change to a copy of the stack.
    return layers if 12 * first < free else None


def compare_logits(
    adapter: OpenAdapter,
    merged: Checkpoint,
    layers: int,
    bias: Mapping[int, Sequence[float]] | None = None,
) -> tuple[float, float]:
    """How far the merged logits are from base + adapter's, and how far the adapter moves the base.

    Both are norms over the norm of base + adapter's logits. If these are all 0, an error is 0 if
    the others are too, and otherwise infinite.
    """
    base = adapter.base
    ids = random_tokens(base)
    model = load(base, layers)
    plain = logits_of(model, ids)
    total = base.model_config.get_text_config().num_hidden_layers
    model = with_adapter(model, adapter, partial=layers < total)
    if base.family.bias_export == "tensor":
        _set_bias(model, bias or {})
    try:
        expected = logits_of(model, ids)
    except Exception as problem:  # the base alone ran
        if is_machine_failure(problem):
            raise
        reason = reason_of(problem)
        raise AdapterError(
            f"PEFT cannot run the model with its modules: {reason:.200}"
        ) from problem
    del model
    error = _distance(logits_of(load(merged, layers), ids), expected)
    return error, _distance(plain, expected)


def logits_note(merged: Checkpoint, error: float, moved: float) -> str:
    """Raise unless the logits are those of base + adapter; what they cannot tell apart.

    ``error`` and ``moved`` are those of :func:`compare_logits`.
    """
    kinds = {info.dtype for info in merged.tensors.values()}
    coarsest = next(kind for kind in ("BF16", "F16", "F32", "F64") if kind in kinds)
    bound, nearer = LOGIT_TOLERANCE[coarsest], error * NEARER <= moved
    if not error <= bound and not (nearer and coarsest in ("BF16", "F16")):
        raise VerificationError(
            f"{merged.folder}: logits differ from base + adapter by {error:.2e} (relative), which "
            f"itself moves them by {moved:.2e}; the tolerance is {bound:.0e}. The tensors are "
            "base + adapter, so the class may use a matrix without PEFT's module of it, which then "
            "did not train (Jamba's dt_proj); otherwise report a bug"
        )
    if moved == 0:
        return "the adapter does not move the logits"
    if nearer:
        return ""
    effect = "hides" if error >= moved else "blurs"
    return (
        f"rounding to {coarsest} {effect} the adapter: it moves the logits by "
        f"{100 * error / moved:.0f} % of what the adapter moves them; `merge --dtype float32` "
        "writes the sums without this rounding"
    )


def load(checkpoint: Checkpoint, layers: int) -> Any:
    """The checkpoint's first layers in transformers, in float32 and eval mode."""
    from transformers.utils import logging as transformers_log

    config = copy.deepcopy(checkpoint.model_config)
    if layers < config.get_text_config().num_hidden_layers:
        config = of_first_layers(config, layers)
    # Float32 for both, so that the weights are compared and not the rounding of activations.
    kind: Any = class_of(config)
    verbosity = transformers_log.get_verbosity()
    transformers_log.set_verbosity_error()  # it would list the tensors of the other layers
    try:
        if checkpoint.quantized is not None:
            state = checkpoint.quantized.slices(torch.float32)
            kind = type(meta_model(config))
            with without_bar():
                return kind.from_pretrained(
                    None, config=config, dtype=torch.float32, state_dict=state
                ).eval()
        with without_bar(), only_weights(checkpoint.folder) as weights:
            return kind.from_pretrained(weights, config=config, dtype=torch.float32).eval()
    finally:
        transformers_log.set_verbosity(verbosity)


def logits_of(model: nn.Module, ids: list[Tensor]) -> list[Tensor]:
    """Float64 logits for each row of token ids."""
    with undisturbed(model):
        return [model(input_ids=row, use_cache=False).logits.double() for row in ids]


def _distance(logits: list[Tensor], reference: list[Tensor]) -> float:
    norm = sum(values.square().sum().item() for values in reference) ** 0.5
    pairs = zip(logits, reference, strict=True)
    error = sum((one - other).square().sum().item() for one, other in pairs) ** 0.5
    return error / norm if norm else math.inf if error else 0.0


def _set_bias(model: nn.Module, bias: Mapping[int, Sequence[float]]) -> None:
    for name, buffer in model.named_buffers():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and name.endswith(CORRECTION_BIASES) and int(layer[1]) in bias:
            buffer.copy_(torch.tensor([float(value) for value in bias[int(layer[1])]]))


def random_tokens(base: Checkpoint) -> list[Tensor]:
    """Three rows of random token ids from the base's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    size = base.model_config.get_text_config().vocab_size
    return [torch.randint(size, (1, length), generator=generator) for length in (7, 16, 33)]
