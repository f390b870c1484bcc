"""Measure the strength of a method's terms without training."""

import itertools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

from moe_finetune.errors import ObjectiveError, RecipeError
from moe_finetune.io.tables import aligned
from moe_finetune.moe.layers import in_mode
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.specialization import Specialization
from moe_finetune.training.strength import PARTS


def measure_strength(
    model: nn.Module, method: Any, batches: Iterable[Mapping[str, Tensor]]
) -> list[dict[str, Any]]:
    """Measure the strength of each of ``method``'s terms on one window, without training.

    Args:
        model: a supported causal language model, with or without PEFT; parameters to train have
            ``requires_grad`` set.
        method: a preset's name, a ``method:`` mapping, or a resolved method. A share is converted
            to the weight that gives it.
        batches: the window's micro-batches, each with ``labels``; the language loss is the mean
            over all tokens that have a label.

    Returns:
        One row per term: ``term``, ``weight``, ``share_router``, ``share_experts``,
            ``cosine_router``, ``cosine_experts`` (None if the part does not train) and
            ``weight_for_10_percent`` (None for a term without a gradient, such as a hinge that is
            met).

    Raises:
        ObjectiveError: there are no batches, a batch has no labels, or a term with a share has no
            gradient.
    """
    window = [dict(batch) for batch in batches]
    if not window or any(batch.get("labels") is None for batch in window):
        raise ObjectiveError("measure_strength needs at least one batch, each with labels")
    learned = [int((batch["labels"][:, 1:] != -100).sum()) for batch in window]
    method = resolve_method(method)
    measured = method.strength.model_copy(update={"first": True})
    method = method.model_copy(update={"strength": measured})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trainable]
    device = next(model.parameters()).device
    try:
        with (
            in_mode(model, train=True),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            Specialization(model, method, accumulation=len(window)) as specialization,
        ):
            for batch, tokens in zip(window, learned, strict=True):
                (model(**batch).loss * (tokens / max(sum(learned), 1))).backward()
            return [row.row() for row in specialization.strength.end(last=True)]
    finally:
        for parameter, gradient in zip(trainable, gradients, strict=True):
            parameter.grad = gradient


def strength_of(checkpoint: str, recipe: Recipe) -> list[dict[str, Any]]:
    """Measure the recipe's losses on ``checkpoint`` and the first window of its training.

    Model, adapter, seed and the order of the data are the run's; nothing is trained or saved. With
    several processes the run's window is larger: this is one process's part of it.

    Raises:
        RecipeError: the recipe has no losses, or does not fit the checkpoint.
        ObjectiveError: a term reaches nothing trainable, or one with a share has no gradient.
    """
    from moe_finetune.lora.targets import add_lora
    from moe_finetune.training.preflight import check_inputs
    from moe_finetune.training.start import start_model
    from moe_finetune.training.trainer import build_trainer

    if STAGES[recipe.stage].form != "tokens":
        raise RecipeError(
            "--strength: only stages sft and pretrain can be measured without training; stage "
            f"{recipe.stage} logs it at its first step"
        )
    model_section = recipe.model.model_copy(update={"path": checkpoint})
    recipe = recipe.model_copy(update={"model": model_section, "evaluation": None})
    if not recipe.method.terms:
        raise RecipeError(
            "--strength: the recipe's method has no losses to measure; choose a method with losses"
        )
    inputs = check_inputs(recipe)
    model: Any = start_model(inputs.start)
    set_seed(recipe.seed)
    model = add_lora(model, recipe.lora, recipe.router.train)
    with tempfile.TemporaryDirectory() as folder:
        trainer, callback = build_trainer(
            recipe, Path(folder), model, inputs.start.tokenizer, inputs.train, None
        )
        model.to(trainer.args.device)
        loader = trainer.get_train_dataloader()
        window = list(itertools.islice(loader, trainer.args.gradient_accumulation_steps))
    batches = [{k: v for k, v in batch.items() if torch.is_tensor(v)} for batch in window]
    with trainer.compute_loss_context_manager():
        return measure_strength(model, callback.method, batches)


def strength_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows of :func:`measure_strength` as a text table."""

    def number(value: float | None, form: str, factor: float = 1.0) -> str:
        return "-" if value is None else format(factor * value, form)

    table = [
        ("loss", "weight", "% router", "% experts", "cos router", "cos experts", "weight for 10 %")
    ]
    for row in rows:
        shares = [number(row[f"share_{part}"], ".3g", 100) for part in PARTS]
        cosines = [number(row[f"cosine_{part}"], "+.2f") for part in PARTS]
        weights = [number(row[name], ".3g") for name in ("weight", "weight_for_10_percent")]
        table.append((row["term"], weights[0], *shares, *cosines, weights[1]))
    return (
        aligned(table)
        + "\n%: norm of the loss's gradient in percent of that of the trainer's loss, on the "
        "parameters that train; cos: the cosine between the two"
    )
