"""DeepSeek-MoE written once more, slowly, from the paper and Llama's formulas.

Loops over heads, tokens and experts; reads weights under their published names, one matrix per
expert; shares no code with the package.
"""

import math

import torch
from torch import Tensor


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate the pairs (i, i + size/2) of one head's vector by position * theta^(-2i/size)."""
    half = x.shape[-1] // 2
    turned = []
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        turned.append((math.cos(angle), math.sin(angle)))
    cos = torch.tensor([c for c, _ in turned])
    sin = torch.tensor([s for _, s in turned])
    first, second = x[:half], x[half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = gate @ x
    return down @ (g * torch.sigmoid(g) * (up @ x))


def _attention(x_SH: Tensor, w: dict[str, Tensor], name: str, config) -> Tensor:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    theta = config.rope_parameters["rope_theta"]
    q, k, v = (x_SH @ w[f"{name}.{p}_proj.weight"].T for p in "qkv")
    rows = []
    for s in range(len(x_SH)):
        outs = []
        for h in range(heads):
            kv = h // (heads // kv_heads)
            query = _rotate(q[s, h * size : (h + 1) * size], s, theta)
            part = slice(kv * size, (kv + 1) * size)
            scores = torch.stack(
                [query @ _rotate(k[t, part], t, theta) / math.sqrt(size) for t in range(s + 1)]
            )
            outs.append(scores.softmax(0) @ v[: s + 1, part])
        rows.append(w[f"{name}.o_proj.weight"] @ torch.cat(outs))
    return torch.stack(rows)


def _moe(x: Tensor, w: dict[str, Tensor], name: str, config) -> Tensor:
    probabilities = (w[f"{name}.gate.weight"] @ x).softmax(0)
    chosen = sorted(range(config.n_routed_experts), key=lambda e: -probabilities[e].item())
    chosen = chosen[: config.num_experts_per_tok]
    total = sum(probabilities[e] for e in chosen) if config.norm_topk_prob else 1.0
    kinds = ("gate", "up", "down")
    output = torch.zeros_like(x)
    for e in chosen:
        weights = [w[f"{name}.experts.{e}.{kind}_proj.weight"] for kind in kinds]
        output = output + probabilities[e] / total * _gated(x, *weights)
    if config.n_shared_experts:
        output = output + _gated(x, *(w[f"{name}.shared_experts.{k}_proj.weight"] for k in kinds))
    return output


def logits(tokens: list[int], w: dict[str, Tensor], config) -> Tensor:
    """Logits (S, V) of one sequence."""
    x = torch.stack([w["model.embed_tokens.weight"][t] for t in tokens])
    for layer in range(config.num_hidden_layers):
        name, eps = f"model.layers.{layer}", config.rms_norm_eps
        normed = _rms_norm(x, w[f"{name}.input_layernorm.weight"], eps)
        x = x + _attention(normed, w, f"{name}.self_attn", config)
        normed = _rms_norm(x, w[f"{name}.post_attention_layernorm.weight"], eps)
        sparse = layer >= config.first_k_dense_replace and layer % config.moe_layer_freq == 0
        rows = []
        for row in normed:
            if sparse:
                rows.append(_moe(row, w, f"{name}.mlp", config))
            else:
                matrices = (w[f"{name}.mlp.{k}_proj.weight"] for k in ("gate", "up", "down"))
                rows.append(_gated(row, *matrices))
        x = x + torch.stack(rows)
    x = _rms_norm(x, w["model.norm.weight"], config.rms_norm_eps)
    return x @ w["lm_head.weight"].T
