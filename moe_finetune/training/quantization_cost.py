"""The cost of quantizing a base before training: its loss on a recipe's rows, by format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moe_finetune.checkpoint.loading import load_model
from moe_finetune.quantization.codec import Kind, bitsandbytes
from moe_finetune.quantization.weight import resident_bytes
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.preflight import check_inputs
from moe_finetune.training.snapshot import sample_examples


@dataclass(frozen=True)
class Cost:
    """The cost of one format.

    Attributes:
        held: the number format, or the dtype of the unquantized weights.
        loss: nats per token, over every token but each row's first.
        increase: relative increase of the loss over the unquantized base's.
        weights: memory of the model's weights, in bytes.
        tokens: number of tokens in the mean.
    """

    held: str
    loss: float
    increase: float
    weights: int
    tokens: int


def quantization_cost(checkpoint: str, recipe: Recipe) -> list[Cost]:
    """Loss of ``checkpoint`` on the recipe's rows, unquantized, in int8 and in nf4.

    The rows come from the validation set, or else the training set: 8,192 tokens in all, an equal
    part of each source. One model is in memory at a time.

    Raises:
        RecipeError: the recipe does not fit the checkpoint.
        DependencyError: bitsandbytes cannot be used here.
    """
    bitsandbytes()
    section = recipe.model.model_copy(update={"path": checkpoint, "quantization": "none"})
    recipe = recipe.model_copy(update={"model": section, "evaluation": None})
    inputs = check_inputs(recipe)
    base = inputs.start.checkpoint
    assert base is not None
    rows = [
        torch.tensor(row["input_ids"])
        for row in sample_examples(inputs.sources, recipe.data.max_length)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    costs: list[Cost] = []
    for kind in (None, *reversed(get_args(Kind))):
        model = load_model(
            base,
            dtype=recipe.model.dtype,
            device_map=device,
            quantization=kind,
            attn_implementation=recipe.model.attn_implementation,
        )
        loss, tokens = mean_loss(model, rows)
        plain = costs[0].loss if costs else loss
        stored_as = kind or recipe.model.dtype
        costs.append(Cost(stored_as, loss, loss / plain - 1, resident_bytes(model), tokens))
        del model
    return costs


@torch.no_grad()
def mean_loss(model: Any, rows: Sequence[Tensor]) -> tuple[float, int]:
    """Mean cross-entropy of the next token over all rows, in nats, and the number of tokens."""
    total, tokens = 0.0, 0
    for row in rows:
        if len(row) < 2:
            continue
        ids = row.to(model.device)
        logits = model(input_ids=ids[None, :-1]).logits[0].float()
        total += float(cross_entropy(logits, ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    return total / tokens, tokens


def cost_table(costs: Sequence[Cost]) -> str:
    """The costs as a text table."""
    lines = [f"{'weights':<10} {'GB':>8} {'loss':>9} {'increase':>9}"]
    for cost in costs:
        lines.append(
            f"{cost.held:<10} {cost.weights / 1e9:8.3f} {cost.loss:9.4f} {cost.increase:+9.2%}"
        )
    return "\n".join([*lines, f"loss in nats a token, over {costs[0].tokens:,} tokens"])
