"""The tensors that transformers' classes make of a plain config, without importing these.

Shape legend: E routed experts, H hidden, D expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_finetune.models.base import GATED_MLP, Family
from moe_finetune.models.plain_config import PlainConfig
from moe_finetune.models.structure import Shapes

Named = Iterator[tuple[str, tuple[int, ...]]]


def parameters(config: PlainConfig, family: Family) -> Shapes:
    """Name and shape of every parameter of the loaded model."""
    return dict(_parameters(config, family))


def files(config: PlainConfig, family: Family) -> Shapes:
    """Name and shape of every tensor in the files."""
    disk, experts = family.disk, family.num_experts(config)
    found: Shapes = {}
    sparse = {f"{_layer(family, n)}{family.block_path}.": n for n in family.moe_layers(config)}
    stacks = {f"{family.experts_name}.{name}": name for name in family.expert_parameters}
    for name, shape in _parameters(config, family):
        place = next((place for place in sparse if name.startswith(place)), "")
        inside = name[len(place) :]
        if not place:
            found[name] = shape
        elif inside in stacks:
            parts = disk.parts(stacks[inside])
            piece = (shape[1] // len(parts), shape[2])
            for expert in range(experts):
                for part in parts:
                    found[disk.name(part, sparse[place], expert)] = piece
        else:
            found[f"{disk.block.format(layer=sparse[place])}.{inside}"] = shape
    if disk.router_bias is not None:
        for layer in sparse.values():
            found[disk.name("router_bias", layer)] = (experts,)
    return found


def _parameters(config: PlainConfig, family: Family) -> Named:
    hidden, vocabulary = config.hidden_size, config.vocab_size
    width, experts = family.expert_width(config), family.num_experts(config)
    sparse = set(family.moe_layers(config))
    yield f"{family.backbone}.embed_tokens.weight", (vocabulary, hidden)
    for number in range(config.num_hidden_layers):
        layer = _layer(family, number)
        for name, shape in _ATTENTION[family.name](config):
            yield f"{layer}self_attn.{name}.weight", shape
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
        if number not in sparse:
            yield from _mlp(f"{layer}mlp.", config.intermediate_size, hidden)
            continue
        yield f"{layer}{family.router_target}", (experts, hidden)
        yield f"{layer}{family.expert_targets[0]}", (experts, 2 * width, hidden)
        yield f"{layer}{family.expert_targets[1]}", (experts, hidden, width)
        if family.shared_targets:
            shared = f"{layer}{family.shared_targets[0].rpartition('.')[0]}."
            yield from _mlp(shared, config.n_shared_experts * width, hidden)
    yield f"{family.backbone}.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _layer(family: Family, number: int) -> str:
    return f"{family.backbone}.layers.{number}."


def _mlp(place: str, width: int, hidden: int) -> Named:
    for name in GATED_MLP:
        yield f"{place}{name}.weight", (hidden, width) if name == "down_proj" else (width, hidden)


def _heads(config: PlainConfig) -> Named:
    """Llama's attention."""
    hidden, size = config.hidden_size, config.head_dim
    own, shared = config.num_attention_heads * size, config.num_key_value_heads * size
    yield "q_proj", (own, hidden)
    yield "k_proj", (shared, hidden)
    yield "v_proj", (shared, hidden)
    yield "o_proj", (hidden, own)


def _heads_normed(config: PlainConfig) -> Named:
    """Qwen's, with a norm within each head."""
    yield from _heads(config)
    yield "q_norm", (config.head_dim,)
    yield "k_norm", (config.head_dim,)


def _normed(config: PlainConfig) -> Named:
    """OLMoE's, with a norm over all heads together."""
    yield from _heads(config)
    yield "q_norm", (config.num_attention_heads * config.head_dim,)
    yield "k_norm", (config.num_key_value_heads * config.head_dim,)


def _latent(config: PlainConfig) -> Named:
    """DeepSeek's latent attention."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    plain, value = config.qk_nope_head_dim, config.v_head_dim
    queries = heads * (plain + config.qk_rope_head_dim)
    if config.q_lora_rank is None:
        yield "q_proj", (queries, hidden)
    else:
        yield "q_a_proj", (config.q_lora_rank, hidden)
        yield "q_a_layernorm", (config.q_lora_rank,)
        yield "q_b_proj", (queries, config.q_lora_rank)
    yield "kv_a_proj_with_mqa", (rank + config.qk_rope_head_dim, hidden)
    yield "kv_a_layernorm", (rank,)
    yield "kv_b_proj", (heads * (plain + value), rank)
    yield "o_proj", (hidden, heads * value)


_ATTENTION: dict[str, Callable[[PlainConfig], Named]] = {
    "deepseek_moe": _heads,
    "deepseek_v2": _latent,
    "moonlight": _latent,
    "qwen3_moe": _heads_normed,
    "olmoe": _normed,
    "mixtral": _heads,
}
