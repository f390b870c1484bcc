"""DeepSeek-MoE-16B (``model_type: deepseek``): a native class, since transformers 5 has none."""

from moe_finetune.families.base import Family, after_dense_layers

FAMILY = Family(
    name="deepseek_moe",
    model_type="deepseek",
    architecture="DeepseekForCausalLM",
    title="DeepSeek-MoE-16B",
    score="softmax",
    attention_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    shared_targets=(
        "shared_experts.gate_proj",
        "shared_experts.up_proj",
        "shared_experts.down_proj",
    ),
    num_experts=lambda config: config.n_routed_experts,
    moe_layers=after_dense_layers,
)
