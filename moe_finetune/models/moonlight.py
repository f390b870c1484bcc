"""Moonlight-16B-A3B: DeepSeek-V3's class, sigmoid router with a correction bias for selection."""

from moe_finetune.models.base import (
    MLA,
    SHARED_EXPERTS,
    DiskLayout,
    Family,
    after_dense_layers,
    expert_groups,
    require,
)


def _check(config) -> None:
    require(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",), moe_layer_freq=(1,))


FAMILY = Family(
    name="moonlight",
    model_type="deepseek_v3",
    title="Moonlight-16B-A3B",
    score="sigmoid",
    attention_targets=MLA,
    shared_targets=SHARED_EXPERTS,
    disk=DiskLayout(router_bias="gate.e_score_correction_bias"),
    num_experts=lambda config: config.n_routed_experts,
    scaling=lambda config: float(config.routed_scaling_factor),
    groups=expert_groups,
    moe_layers=after_dense_layers,
    check=_check,
    bias_export="tensor",
)
