"""How a run's stage changes its step: rows, length, loss, second model, generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.memory.short_model import Device

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe


TILE = 32768
"""Columns of logits that TRL's trainers compute at a time."""


@dataclass(frozen=True)
class StepShape:
    """The largest possible micro-batch.

    Attributes:
        rows: rows trained on at once, counting both of a pair.
        length: tokens of a row, prompt and completion together.
        prompt: tokens of the prompt that generation starts from.
        generated: rows that the model itself generates at once; 0 if vLLM does or none are
            generated.
        concurrent: whether a forward without gradients runs while the training graph is alive.
        second: the second model in memory: "reference" or None.
    """

    rows: int
    length: int
    prompt: int
    generated: int = 0
    concurrent: bool = False
    second: str | None = None

    @property
    def text(self) -> str:
        parts = [f"{self.rows} rows of {self.length:,} tokens"]
        if self.generated:
            parts.append(f"{self.generated} generated at once")
        if self.second:
            parts.append(f"a {self.second} with the model")
        return ", ".join(parts)


def step_shape(recipe: Recipe) -> StepShape:
    """The micro-batch of the recipe's stage, as TRL's trainer runs it."""
    trainer, stage = recipe.trainer, recipe.stage
    batch = int(trainer.get("per_device_train_batch_size", 8))
    prompt = recipe.data.max_length
    second = "reference" if STAGES[stage].reference and recipe.lora is None else None
    if stage == "dpo":  # chosen and rejected in one batch
        batch *= 2
    if STAGES[stage].form != "prompts":
        stored = bool(trainer.get("precompute_ref_log_probs", False))
        concurrent = STAGES[stage].reference and not stored
        return StepShape(
            batch, prompt, prompt, concurrent=concurrent, second=None if stored else second
        )
    defaults: Any = STAGES[stage].config_class().__dataclass_fields__
    longest = trainer.get("max_completion_length", defaults["max_completion_length"].default)
    generated = 0
    if not trainer.get("use_vllm", False):
        windows = int(trainer.get("gradient_accumulation_steps", 1))
        windows = int(trainer.get("steps_per_generation") or windows)
        generated = int(trainer.get("generation_batch_size") or batch * windows)
    if recipe.lora is None and float(trainer.get("beta", defaults["beta"].default)) > 0:
        second = "reference"
    return StepShape(batch, prompt + int(longest), prompt, generated, second=second)


def second_model_bytes(recipe: Recipe, shape: StepShape, model: int) -> int:
    """Bytes of the second model's weights; ``model``: parameters of the trained one."""
    if shape.second is None:
        return 0
    item = 4 if recipe.model.dtype == "float32" else 2
    return item * model


def stage_loss(model: Any, ids: Tensor, recipe: Recipe, device: Device) -> Tensor:
    """A scalar whose graph stores what TRL's loss for the stage stores of head and logits."""
    smoothing = float(recipe.trainer.get("label_smoothing_factor", 0.0))
    if not smoothing or STAGES[recipe.stage].form != "tokens":
        return _log_probabilities(model, ids, device)
    from transformers.trainer_pt_utils import LabelSmoother

    output = model(input_ids=ids, use_cache=False)
    return LabelSmoother(epsilon=smoothing)(output, ids, shift_labels=True)


def _log_probabilities(model: Any, ids: Tensor, device: Device) -> Tensor:
    """Logits in tiles, as TRL's fused head computes them for the next tokens."""
    from trl.kernels import ChunkedLogProbFunction

    from moe_finetune.moe.layers import backbone_of

    hidden = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings().weight
    # A tile may be wider than the vocabulary; on a CPU, untouched pages take no memory.
    tile = TILE if device == "cuda" else min(TILE, head.shape[0])
    outputs = ("log_probs", "entropy", "is_top1")
    log_probs, *_ = ChunkedLogProbFunction.apply(
        *(hidden.flatten(0, 1), head, None, ids[:, 1:].flatten(), 1.0, tile, None, 1.0, outputs)
    )
    return -log_probs.sum() / ids.numel()


def cache_bytes(model: Any) -> list[tuple[int, int]]:
    """For each layer, from fake tensors: the cache's bytes per row and per token."""
    first, second = _cached(model, 8), _cached(model, 16)
    tokens = [(b - a) // 8 for a, b in zip(first, second, strict=True)]
    return [(a - 8 * token, token) for a, token in zip(first, tokens, strict=True)]


def _cached(model: Any, length: int) -> list[int]:
    from moe_finetune.moe.layers import in_mode

    ids = torch.zeros(1, length, dtype=torch.int64)
    with in_mode(model, train=False), torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    return [
        sum(t.numel() * t.element_size() for t in vars(layer).values() if isinstance(t, Tensor))
        for layer in cache.layers
    ]
