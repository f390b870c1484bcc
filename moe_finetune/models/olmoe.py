"""OLMoE: softmax router, 64 experts in every layer, no shared experts."""

from moe_finetune.models.base import QKVO, Family

FAMILY = Family(
    name="olmoe",
    model_type="olmoe",
    title="OLMoE-1B-7B",
    score="softmax",
    attention_targets=QKVO,
    expert_width=lambda config: config.intermediate_size,
)
