"""The shapes at which a step is timed: two small ones, and four checkpoints at full width."""

from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

_MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
}


def _qwen(hidden, heads, kv, head_dim, width, experts, top_k, vocab):
    return Qwen3MoeConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        moe_intermediate_size=width,
        intermediate_size=3 * width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        vocab_size=vocab,
    )


def _deepseek_moe():
    from moe_finetune.models.deepseek_moe import DeepseekConfig

    return DeepseekConfig(**_DEEPSEEK, intermediate_size=10944, vocab_size=102400)


GEOMETRIES = {
    # name: (config, default layers)
    "tiny": (lambda: _qwen(128, 4, 2, 32, 48, 12, 3, 512), 2),
    "small-cpu": (lambda: _qwen(512, 8, 4, 64, 256, 64, 8, 4096), 4),
    "qwen3_30b_a3b": (lambda: _qwen(2048, 32, 4, 128, 768, 128, 8, 151936), 4),
    "gpt_oss_20b": (
        lambda: GptOssConfig(num_local_experts=32, attn_implementation="eager"),
        4,
    ),
    "deepseek_moe_16b": (_deepseek_moe, 4),
    "deepseek_v2_lite": (
        lambda: DeepseekV2Config(
            **_DEEPSEEK,
            **_MLA,
            intermediate_size=10944,
            vocab_size=102400,
            topk_method="greedy",
            routed_scaling_factor=1.0,
        ),
        4,
    ),
    "moonlight_16b_a3b": (
        lambda: DeepseekV3Config(
            **_DEEPSEEK,
            **_MLA,
            intermediate_size=11264,
            vocab_size=163840,
            routed_scaling_factor=2.446,
        ),
        4,
    ),
}


def config_of(arguments):
    make, layers = GEOMETRIES[arguments.geometry]
    config = make()
    config.num_hidden_layers = arguments.layers or layers
    if getattr(config, "layer_types", None):  # one per layer
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config
