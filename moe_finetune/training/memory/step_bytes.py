"""Bytes of one training step by a formula, which ``make test-newest`` compares with TRL's own step.

Numbers that a decoder layer keeps for its backward, for each token, with H hidden units, Q query
units, K chosen experts of width D, and O outputs of its other linear layers: 7 H + 3.3 Q + 1.4 O,
another 3 Q if queries and keys are normalized, and K (2 D + H) in an MoE layer, whose backward has
another K (3 D + 2.6 H) at once. Adapters of rank r keep 2 r for each linear layer and K 5 r for
experts, with the experts' factors in the step's dtype. An evaluation, which keeps nothing, has
K (3 D + 3.6 H) + 8 H at once. They were fitted to steps of TRL's trainers on tensors without
values for sixteen published models, and are within 15 % there. Mamba and linear attention count as
transformers' own torch code runs them, unless their kernels are installed, which keep less.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Any, Literal

from moe_finetune.moe.layers import backbone_of, causal_lm, family_in, places_in
from moe_finetune.recipe.stages import STAGES, checkpointing
from moe_finetune.training.memory.micro_batch import (
    MicroBatch,
    evaluation_batch,
    micro_batch,
    routing_tokens,
)

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.data.row_lengths import LengthsOfData
    from moe_finetune.recipe.schema import Recipe

Device = Literal["cuda", "cpu"]
TOKENS, COLUMNS = 4096, 32768
"""Tile of logits that TRL's trainers compute at a time."""
CHUNK = 64
"""Tokens that the gated delta rule takes at once."""
SCAN_KERNELS = ("mamba_ssm", "fla")
BACKWARD, MEASURING = "backward", "measuring the losses' strength"
AFTER_MEASURING = f"backward after {MEASURING}"
EVALUATION, ROUTING = "forward of the evaluation", "routing before and after"


def step_bytes(
    model: nn.Module,
    recipe: Recipe,
    device: Device,
    gradients: int,
    lengths: LengthsOfData | None = None,
) -> dict[str, int]:
    """Peak bytes above what is stored, by moment of a step, from the shapes of ``model``.

    ``gradients``: bytes of all gradients that a device keeps until the step ends; ``lengths``: of
    the run's rows, if they are read.
    """
    from moe_finetune.losses import TERMS

    config = causal_lm(model).config
    places = places_in(model)
    named = [*model.named_parameters()]
    text = config.get_text_config()
    trainer = recipe.trainer
    method = recipe.method
    batch = micro_batch(recipe, lengths)
    tokens, item = batch.tokens, 4 if recipe.model.dtype == "float32" else 2
    hidden = text.hidden_size
    chosen = family_in(model).top_k(config)
    width = places.expert_width
    losses = any(
        "gram" in need or need == "outputs" for term in method.terms for need in TERMS[term].needs
    )
    dense = method.router_gradient == "dense"
    outputs = chosen * hidden if losses else 0  # gradients of the experts' outputs, by the losses
    adapted = any(".lora_" in n and f".{places.experts_path}." in n for n, _ in named)
    trained = adapted or recipe.lora is None
    working = chosen * (3 * width + (2.6 if trained else 1.7) * hidden) + outputs
    eager = (recipe.model.attn_implementation or config._attn_implementation) == "eager"
    scores = text.num_attention_heads * batch.length if eager else 0  # of all pairs of tokens
    kernels = device == "cuda" and any(map(importlib.util.find_spec, SCAN_KERNELS))
    scans = [(None, 0, 0) if kernels else scan_of(layer) for layer in backbone_of(model).layers]
    scanning = (
        4
        / item
        * max(  # in float32
            peak - saved for _, saved, peak in scans
        )
    )
    if dense:  # one expert at a time on every token; products and scalars of all are float32
        working += 3 * width + hidden + 4 / item * (hidden + places.num_experts)
    working = max(working, 2 * scores, scanning)
    layers = [
        _activations(layer, text, places.experts_path, mixer)
        + 1.25 * scores
        + 4 / item * saved
        + (chosen * (2 * width + hidden) if index in places.moe_layers else 0)
        # The scores of all experts and the weights that they would have.
        + (dense * 8 / item * places.num_experts if index in places.moe_layers else 0)
        for index, (layer, (mixer, saved, _)) in enumerate(
            zip(backbone_of(model).layers, scans, strict=True)
        )
    ]
    whole = not checkpointing(trainer, default=device == "cuda")
    size = item * tokens
    activations = size * (sum(layers) if whole else len(layers) * hidden)
    if whole:
        share = chosen / places.num_experts
        activations += _kept_by_lora(model, places.experts_path, share, tokens, item)
    if trainer.get("activation_offloading"):
        activations = 0

    def head_of(count: int) -> float:
        # On a GPU a kernel folds a tile of logits in place; on a CPU, operations in float32 copy
        # it.
        tile = min(count, TOKENS) * min(text.vocab_size, COLUMNS)
        tile *= item if device == "cuda" else 28
        if trainer.get("label_smoothing_factor") and STAGES[recipe.stage].form == "tokens":
            tile = 5 * item * count * text.vocab_size
        return tile + 8 * count * hidden

    head = head_of(tokens)
    if recipe.lora is None:
        head += 4 * hidden * text.vocab_size  # the head's gradient, before it is added
    layer = size * (working if whole else working + max(layers))
    # An earlier micro-batch has left gradients; else they replace kept inputs layer by layer.
    accumulates = int(trainer.get("gradient_accumulation_steps", 1)) > 1
    mask = mask_bytes(recipe, text, batch)
    start = activations + mask + (gradients if accumulates else 0)
    # Without checkpointing all activations are there when the head's tile and the last layer's
    # backward need theirs, and gradients grow as activations are freed: the larger end counts. With
    # it one layer at a time is computed again, beside the inputs of all and what gradients there
    # are.
    if whole:
        backward = max(start + max(head + size * outputs, size * scanning), gradients + layer)
    else:
        backward = max(start, gradients + mask) + max(layer, head)
    peaks = {"forward, head and loss": start + head, BACKWARD: backward}
    # Without a graph a layer keeps nothing for the next one. Routing is measured with the experts'
    # outputs; attention that is not fused has all pairs of tokens several times at once.
    forward = chosen * (3 * width + 3.6 * hidden) + 8 * hidden
    pairs = 8 * hidden + (5.5 if item == 2 else 4) * scores
    peaks[ROUTING] = item * routing_tokens(recipe, lengths) * max(forward + chosen * hidden, pairs)
    if (evaluation := evaluation_batch(recipe, lengths)) is not None:
        scored = evaluation.tokens
        # Routing of its first batches is measured, which keeps a layer's outputs of experts; rows
        # of prompts are generated from, and not measured.
        observed = 0 if STAGES[recipe.stage].form == "prompts" else chosen * hidden
        layer_forward = item * scored * max(forward + observed, pairs)
        peaks[EVALUATION] = mask_bytes(recipe, text, evaluation) + max(
            head_of(scored), layer_forward
        )
    if method.terms and (
        method.strength.first or any(options.share is not None for options in method.terms.values())
    ):
        # The graph stays until the trainer's own backward.
        peaks[MEASURING] = backward + (gradients if whole else 6 * size * hidden)
        peaks[AFTER_MEASURING] = backward
    return {moment: round(peak) for moment, peak in peaks.items()}


def mask_bytes(recipe: Recipe, text: Any, batch: MicroBatch) -> int:
    """Bytes of the masks that fused attention takes for padded rows, for all layers together.

    transformers makes one ``(rows, 1, length, length)`` of bool for each kind of attention (full,
    sliding), unless a kernel takes lengths (flash) or no row is padded; eager attention's own mask
    is counted with its scores.
    """
    attention = recipe.model.attn_implementation or "sdpa"
    if batch.rows == 1 or recipe.data.packing or attention != "sdpa":
        return 0
    kinds = {"full_attention"}.union(getattr(text, "layer_types", None) or ())
    masks = len(kinds & {"full_attention", "sliding_attention", "chunked_attention"})
    return masks * batch.rows * batch.length**2


def _kept_by_lora(model: nn.Module, experts: str, share: float, tokens: int, item: int) -> float:
    """Bytes that all adapters keep for their backward in a step without checkpointing.

    Products with A, rank r: 5 r numbers for each of a token's K experts in both projections, of
    which ``share`` is K / E, and 2 r elsewhere; and of experts the factors in the step's dtype,
    since those of float32 are cast layer by layer and the copies stay.
    """
    size = 0.0
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            continue
        of_experts = f".{experts}." in name
        if of_experts and item == 2:
            size += 2 * parameter.numel()
        if ".lora_A." in name:
            size += item * tokens * parameter.shape[0] * (2.5 * share if of_experts else 2)
    return size


def _activations(layer: nn.Module, text: Any, experts: str, mixer: nn.Module | None) -> float:
    """Numbers for each token that a layer keeps outside its routed experts and its ``mixer``."""
    heads = text.num_attention_heads
    hidden = text.hidden_size
    sizes = text.to_dict()
    queries = heads * (sizes.get("qk_head_dim") or sizes.get("head_dim") or hidden // heads)
    scanned = {id(parameter) for parameter in mixer.parameters()} if mixer else set()
    skipped = re.compile(rf"{re.escape(experts)}\.|\.lora_")
    activations = 7 * hidden
    if any("Attention" in type(module).__name__ for module in layer.modules()):
        activations += 3.3 * queries
    for name, parameter in layer.named_parameters():
        if re.search(r"\.q(uery)?_(layer)?norm\.", name):
            activations += 3 * queries
        elif id(parameter) in scanned or parameter.dim() != 2 or skipped.search(name):
            continue
        elif ".base_layer." in name or parameter.requires_grad:
            activations += 1.4 * parameter.shape[0]
        elif "att" not in name and parameter.shape[0] != hidden:
            # A frozen product keeps no input. What keeps numbers is the gate after it: g, u, act(g)
            # of an MLP whose g and u are counted here; nothing follows the one back to H.
            activations += 1.5 * parameter.shape[0]
    return activations


def scan_of(layer: nn.Module) -> tuple[nn.Module | None, float, float]:
    """A layer's mixer with states, and what its scan in torch keeps and has at its peak.

    Float32 numbers for each token, with h heads of width P, N states and chunks of C tokens:
    h (3.4 N + 1.8 C + 9 P) for Mamba 2, I (3.5 N + 5) for Mamba on I channels, 0.8 h C for
    lightning attention, h (10 N + 7 P + 2 N P / C + 5 C) for the gated delta rule and 3.5 h C P
    for Kimi's.
    """
    for module in layer.modules():
        sizes = vars(module)
        heads, width, states = (
            sizes.get(n, 0) for n in ("num_heads", "head_dim", "ssm_state_size")
        )
        if heads and states:
            saved = heads * (3.4 * states + 1.8 * sizes["chunk_size"] + 9 * width)
            return module, saved, 1.5 * saved
        if states:
            saved = sizes["intermediate_size"] * (3.5 * states + 5)
            return module, saved, 2.05 * saved
        if value_heads := sizes.get("num_v_heads", 0):
            keys, values = sizes["head_k_dim"], sizes["head_v_dim"]
            saved = value_heads * (10 * keys + 7 * values + 2 * keys * values / CHUNK + 5 * CHUNK)
            return module, saved, 1.3 * saved
        if hasattr(module, "slope_rate"):
            saved = 0.8 * sizes["num_attention_heads"] * sizes["block_size"]
            return None, saved, 3.6 * saved
        if hasattr(module, "A_log") and heads and width:
            saved = 3.5 * heads * CHUNK * width
            return module, saved, 1.8 * saved
    return None, 0, 0
