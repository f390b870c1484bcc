"""DeepSeek-V2-Lite: MLA attention, softmax router without renormalisation, shared experts."""

from moe_finetune.models.base import (
    MLA,
    SHARED_EXPERTS,
    Family,
    after_dense_layers,
    expert_groups,
    require,
)


def _check(config) -> None:
    require(
        config,
        topk_method=("greedy", "group_limited_greedy"),
        scoring_func=("softmax",),
        norm_topk_prob=(False,),
        moe_layer_freq=(1,),
    )


FAMILY = Family(
    name="deepseek_v2",
    model_type="deepseek_v2",
    title="DeepSeek-V2-Lite",
    score="softmax",
    attention_targets=MLA,
    shared_targets=SHARED_EXPERTS,
    num_experts=lambda config: config.n_routed_experts,
    renormalize=lambda config: False,
    scaling=lambda config: float(config.routed_scaling_factor),
    groups=expert_groups,
    moe_layers=after_dense_layers,
    check=_check,
    bias_export="noaux_tc",
)
