"""Compare recorded, adapted and merged models with the stock one."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.models.base import Family
from moe_finetune.models.structure import class_of
from moe_finetune.training.proof_model import Check, batch, named_parts, watch

LOGITS, GRADIENTS, MERGED = 2e-5, 2e-4, 1e-4
"""Bounds on relative differences of float32 sums in another order; PEFT's merges round more."""


def run_checks(
    make: Callable[[], nn.Module], family: Family, folder: Path
) -> Iterator[list[Check]]:
    """Yield groups of checks; each builds its own model with the same weights."""
    yield _recorded(make(), family)
    yield _gradients(make(), family)
    yield [_merged(make, folder)]
    yield [_packed(make())]


def _difference(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max()) / (float(expected.abs().max()) + 1e-12)


def _bounded(name: str, difference: float, bound: float) -> Check:
    problem = None
    if difference > bound:
        problem = f"{name} differ by {difference:.1e} from the stock model's, bound {bound:.0e}"
    return Check(name, difference, bound, problem)


def _recorded(model: nn.Module, family: Family) -> list[Check]:
    from moe_finetune.moe.hooks import Recorder

    records: list[Any] = []
    tokens = batch(model.config)
    with torch.no_grad():
        expected = model(**tokens).logits
        with Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"):
            actual = model(**tokens).logits
    parts: dict[str, float] = {}
    for layer, record in zip(watch(model, family), records, strict=True):
        index, weights = layer.given[0]
        stock = named_parts(family, layer)
        if not torch.equal(index.reshape(record.index_TK.shape), record.index_TK):
            parts["record: selection"] = 1.0
        for name, stock_part, recorded in (
            ("record: logits", stock["logits"], record.logits_TE),
            ("record: weights", weights, record.weights_TK),
        ):
            now = _difference(stock_part.float().reshape(recorded.shape), recorded.float())
            parts[name] = max(parts.get(name, 0.0), now)
    parts.setdefault("record: selection", 0.0)
    checks = [_bounded(name, difference, LOGITS) for name, difference in parts.items()]
    return [_bounded("logits", _difference(expected, actual), LOGITS), *checks]


def _packed(model: nn.Module) -> Check:
    from moe_finetune.training.packed import BOUND, packed_difference

    name, difference = "packed rows", packed_difference(model)
    problem = None
    if difference > BOUND:
        problem = (
            "rows are declared so that sequences see each other: their logits differ by "
            f"{difference:.1e} from those of each sequence run separately; see rows.per_sequence "
            "and rows.masks_by_position"
        )
    return Check(name, difference, BOUND, problem)


def adapted(model: nn.Module, seed: int = 3) -> nn.Module:
    """Add LoRA with random factors to everything that a recipe can target."""
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.recipe.lora import LoraSection

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = add_lora(model, LoraSection(rank=4, alpha=12.0), "lora")
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    return peft_model


def _gradients(model: nn.Module, family: Family) -> list[Check]:
    from moe_finetune.lora.coverage import group_of
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.moe.layers import backbone_of

    layers = set(family.moe_layers(backbone_of(model).config))
    model = adapted(model)
    stock = _run(model)
    with Recorder(model):
        actual = _run(model)
    worst: dict[str, float] = {}
    for name, gradient in stock.items():
        group = group_of(name, family, layers)
        scale = float(gradient.abs().max()) + 1e-6
        now = float((gradient - actual[name]).abs().max()) / scale
        worst[group] = max(worst.get(group, 0.0), now)
    expected = {"attention", "router", "routed experts"}
    checks = [
        Check(
            f"gradients, {group}",
            problem=f"LoRA reaches no module of the {group}; check LoRA's targets",
        )
        for group in sorted(expected - worst.keys())
    ]
    return checks + [_bounded(f"gradients, {g}", d, GRADIENTS) for g, d in sorted(worst.items())]


def _run(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch(model.config)).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _merged(make: Callable[[], nn.Module], folder: Path) -> Check:
    from moe_finetune.checkpoint import merge_adapter

    base, adapter, merged = folder / "base", folder / "adapter", folder / "merged"
    stock: Any = make()
    tokens = batch(stock.config)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of one file
        stock.save_pretrained(base)
        model: Any = adapted(make())
        model.save_pretrained(adapter, save_embedding_layers=False)
        merge_adapter(base, adapter, merged)
        loaded = class_of(stock.config).from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        untouched, expected, actual = (m(**tokens).logits for m in (stock, model, loaded))
    if _difference(expected, untouched) < 100 * MERGED:
        return Check("merged", problem="the adapter has no effect; check LoRA's targets")
    return _bounded("merged = base + adapter", _difference(expected, actual), MERGED)
