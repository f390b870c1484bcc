"""One training step of the whole model on fake tensors: its peak memory above what is stored.

It runs under the recipe's losses, LoRA, checkpointing and TRL's head as on a GPU, with shapes,
dtypes and lifetimes of the run, but no values and no memory. The experts run as with the GPU's
grouped kernel. What the formula of ``moe_finetune.training.memory.step_bytes`` is compared with.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import trl.kernels.chunked_logprob as kernels
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import masking_utils
from transformers.trainer_pt_utils import LabelSmoother
from trl.kernels import ChunkedLogProbFunction

from eval.bench.measured import LiveBytes
from moe_finetune.data.row_lengths import LengthsOfData
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.objective import Objective
from moe_finetune.models.class_structure import meta_model
from moe_finetune.moe.checkpointing import checkpoint_layers
from moe_finetune.moe.choice.noise import TrainingNoise
from moe_finetune.moe.experts import grouped_products, sums_by_token
from moe_finetune.moe.layers import backbone_of, causal_lm, in_mode, model_facts
from moe_finetune.moe.recorder import hooks
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.observe import observed
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES, checkpointing
from moe_finetune.routing.sums import NEEDS
from moe_finetune.training.memory.micro_batch import evaluation_batch, micro_batch
from moe_finetune.training.memory.plan import MemoryPlan, plan_recipe, quiet
from moe_finetune.training.memory.step_bytes import (
    AFTER_MEASURING,
    BACKWARD,
    COLUMNS,
    EVALUATION,
    MEASURING,
    Device,
)


def adapted_model(config: Any, recipe: Recipe, device: Device) -> Any:
    """The adapted model on the meta device, with checkpointing set as TRL sets it."""
    attention = recipe.model.attn_implementation
    if attention is not None and attention.startswith("flash"):
        attention = "sdpa"  # saves the same tensors without an extra package
    model: Any = meta_model(config, attention)
    if recipe.lora is None or recipe.model.dtype == "float32":
        model = model.float()
    with torch.device("meta"):
        model = add_lora(model, recipe.lora, recipe.router.train).train()
    if checkpointing(recipe.trainer, default=device == "cuda"):
        checkpoint_layers(model, preserve_rng_state=False)  # no state on fake tensors
        model.enable_input_require_grads()
    return model


def step_peaks(
    model: Any,
    recipe: Recipe,
    device: Device,
    sharded: bool = False,
    lengths: LengthsOfData | None = None,
) -> dict[str, int]:
    """Peak bytes above the model's, by moment of a step.

    Args:
        model: the result of :func:`adapted_model`; its tensors become fake ones.
        sharded: leave out gradients, which FSDP2 reduces layer by layer.
        lengths: of the run's rows, if they are read.
    """
    # Some families ask the class on the meta device, whose tensors are not the step's.
    model_facts(model)
    for module in model.modules():  # or its update reads the batch's longest position
        rope = getattr(module, "rope_type", None)
        if isinstance(rope, str):
            module.rope_type = "default"
        elif isinstance(rope, dict):
            module.rope_type = dict.fromkeys(rope, "default")
    tokens_at_once, attention = sums_by_token.CACHED_BYTES, functional.scaled_dot_product_attention
    tiles: Any = nullcontext()
    if device == "cuda":  # takes all tokens at once, fuses attention and folds logits in place
        tokens_at_once, attention = 2**62, lambda q, k, v, *_, **__: _Fused.apply(q, k, v)
        tiles = patch.multiple(
            kernels,
            _forward_tile=lambda *_, **__: None,
            _backward_tile=lambda *_, **__: None,
            _addmm_fp32=lambda acc, a, b: acc,
        )
    one_row: Any = nullcontext()
    if micro_batch(recipe, lengths).rows == 1:  # has no padding, hence no mask of all pairs
        one_row = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with (
        quiet(),
        one_row,
        FakeTensorMode(allow_non_fake_inputs=True),
        # A row is one sequence; fake positions have no values to show it.
        patch.object(hooks, "separate", lambda kwargs, *_: (kwargs, None, False)),
        # The real operator's rules for fake tensors support only bfloat16.
        patch.object(grouped_products, "grouped_mm", _grouped_mm),
        patch.object(grouped_products, "_aligned", lambda _: True),
        patch.object(sums_by_token, "CACHED_BYTES", tokens_at_once),
        patch.object(functional, "scaled_dot_product_attention", attention),
        tiles,
        LiveBytes() as live,
    ):
        return _run(model, recipe, device, live, sharded, lengths)


def _run(
    model: Any,
    recipe: Recipe,
    device: Device,
    live: LiveBytes,
    sharded: bool,
    lengths: LengthsOfData | None,
) -> dict[str, int]:
    """One micro-batch: forward, reference, measurement, backward."""
    model.to_empty(device="cpu")  # fake tensors, which have a device
    causal_lm(model).tie_weights()
    base, peaks, batch = live.now, dict[str, int](), micro_batch(recipe, lengths)
    live.reset()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if sharded:  # reduced layer by layer; each rank keeps its part
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    accumulates = int(recipe.trainer.get("gradient_accumulation_steps", 1)) > 1
    if accumulates and not sharded:
        for parameter in trained:  # there from the window's first micro-batch on
            parameter.grad = torch.zeros_like(parameter)

    def note(name: str) -> None:
        peaks[name] = live.reset() - base

    terms, noise = recipe.method.terms, TrainingNoise(recipe.method.perturbations)
    recorder = Recorder(
        model,
        Objective(terms, model_facts(model)) if terms else None,
        perturbation=noise if noise.active else None,
        token_mask="attention",  # TRL's head has the labels, below the call that is recorded
        dropout=recipe.lora.dropout if recipe.lora else 0.0,
        kernel="grouped",
    )
    recorder.install()
    ids = torch.zeros(batch.rows, batch.length, dtype=torch.int64)
    offloads = bool(recipe.trainer.get("activation_offloading"))
    mixed = partial(torch.autocast, "cpu", torch.bfloat16, recipe.model.dtype == "bfloat16")

    def forward() -> Tensor:
        live.reset()
        with mixed(), _offloaded() if offloads else nullcontext():
            return _loss(model, ids, recipe, device)

    loss = forward()
    note("forward, head and loss")
    if STAGES[recipe.stage].reference and not recipe.trainer.get("precompute_ref_log_probs"):
        with in_mode(model, train=False), torch.no_grad():
            forward()
        note("forward of the reference")
    loss.backward()
    note(BACKWARD)
    shares = any(options.share is not None for options in terms.values())
    if terms and (shares or recipe.method.strength.first):
        if not accumulates:
            model.zero_grad()
        loss = forward()
        # Whole, since recomputed tensors that a partial backward leaves would stay.
        loss.backward(retain_graph=True)
        note(MEASURING)
        if not accumulates:
            model.zero_grad()
        loss.backward()
        note(AFTER_MEASURING)
    del loss
    if (scored := evaluation_batch(recipe, lengths)) is not None:
        model.zero_grad()
        base = live.now  # what is left of a step is counted with it
        live.reset()
        ids = torch.zeros(scored.rows, scored.length, dtype=torch.int64)
        with in_mode(model, train=False), torch.no_grad():
            forward()
        if STAGES[recipe.stage].form != "prompts":  # whose batches have no tokens
            with observed(model, lambda *_: None, NEEDS, recorder=recorder):
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
        note(EVALUATION)
    return peaks


def _loss(model: Any, ids: Tensor, recipe: Recipe, device: Device) -> Tensor:
    """A scalar whose graph stores what TRL's loss stores of head and logits."""
    smoothing = float(recipe.trainer.get("label_smoothing_factor", 0.0))
    if smoothing and STAGES[recipe.stage].form == "tokens":
        output = model(input_ids=ids, use_cache=False)
        return LabelSmoother(epsilon=smoothing)(output, ids, shift_labels=True)
    # Logits in tiles, as TRL's fused head computes them for the next tokens.
    hidden = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings().weight
    # A tile may be wider than the vocabulary; on a CPU, untouched pages take no memory.
    tile = COLUMNS if device == "cuda" else min(COLUMNS, head.shape[0])
    outputs = ("log_probs", "entropy", "is_top1")
    log_probs, *_ = ChunkedLogProbFunction.apply(
        *(hidden.flatten(0, 1), head, None, ids[:, 1:].flatten(), 1.0, tile, None, 1.0, outputs)
    )
    return -log_probs.sum() / ids.numel()


class _Fused(torch.autograd.Function):
    """Saves what flash and cuDNN attention save: Q, K, V, output and one number per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = value.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _grouped_mm(rows: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """``grouped_mm``'s shapes: rows (S, I) times (E, I, O), or (O, S) times (S, I) by group."""
    if right.dim() == 3:
        return rows.new_empty(rows.shape[0], right.shape[2])
    return rows.new_empty(offs.shape[0], rows.shape[0], right.shape[1])


def _offloaded() -> Any:
    """Saved tensors leave the device, as with TRL's ``activation_offloading``."""

    def keep(tensor: Tensor) -> Any:
        return tensor if tensor.is_leaf else (tensor.shape, tensor.dtype)

    def give(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else torch.empty(saved[0], dtype=saved[1])

    return torch.autograd.graph.saved_tensors_hooks(keep, give)


def fake_plan(
    config: Any, recipe: Recipe, device: Device, lengths: LengthsOfData | None = None
) -> MemoryPlan:
    """The plan with the step's own bytes instead of the formula's."""

    def peaks(*_: Any) -> dict[str, int]:
        return step_peaks(adapted_model(config, recipe, device), recipe, device, lengths=lengths)

    with patch("moe_finetune.training.memory.plan.step_bytes", peaks):
        return plan_recipe(config, recipe, device, lengths=lengths)
