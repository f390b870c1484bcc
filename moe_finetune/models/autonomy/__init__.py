"""Autonomy-of-Experts, for training from scratch: experts rank themselves by gate norms.

Lv et al., "Autonomy-of-Experts Models", arXiv 2501.13074, the baseline in P2 (section 2, Figure 3).
"""

from moe_finetune.models.base import QKVO, DiskLayout, Family


def register() -> None:
    """Register the model with transformers' Auto classes; safe to call again."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from moe_finetune.models.autonomy.modeling import (
        AutonomyConfig,
        AutonomyForCausalLM,
        AutonomyModel,
    )

    AutoConfig.register(FAMILY.model_type, AutonomyConfig, exist_ok=True)
    AutoModel.register(AutonomyConfig, AutonomyModel, exist_ok=True)
    AutoModelForCausalLM.register(AutonomyConfig, AutonomyForCausalLM, exist_ok=True)


FAMILY = Family(
    name="autonomy_of_experts",
    model_type="autonomy_of_experts",
    architecture="AutonomyForCausalLM",
    title="Autonomy-of-Experts",
    score="softmax",
    attention_targets=QKVO,
    disk=DiskLayout(
        router="gate.weight", gate=None, gate_up="experts.up_proj", down="experts.down_proj"
    ),
    router_returns=("logits", "weights", "index", "projected"),
    gated=False,
    self_ranking=True,
    expert_width=lambda config: config.intermediate_size,
)
