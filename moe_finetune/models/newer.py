"""Families whose classes came after transformers 5.19; facts from each class in 5.24."""

from typing import Any

from moe_finetune.models.base import (
    MLA,
    QKVO,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    Rows,
    after_dense_layers,
    expert_groups,
    require,
    under,
)
from moe_finetune.models.composites import composite
from moe_finetune.models.rows import (
    scaled,
    sigmoid,
    softmax,
    ungrouped,
    unscaled,
    yes,
)


def _sparse(config: Any) -> list[int]:
    return [layer for layer, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]


def _limited_groups(config: Any) -> tuple[int, int]:
    return (1, 1) if config.topk_method == "greedy" else expert_groups(config)


def _one_group(config: Any) -> None:
    require(config, n_group=(1,))  # groups are taken by their two best experts


_INKLING2 = sigmoid(
    "inkling2_text",
    "Inkling 2 (text)",
    attention_targets=("self_attn.q_proj.linear", "self_attn.o_proj.linear"),
    shared_targets=(),
    renormalize=yes,
    groups=ungrouped,
    since="5.24",  # its projections have other names in 5.23
    rows=Rows(per_sequence=("Inkling2ShortConvolution", "Inkling2DynamicShortConvolution")),
)
_HY_V4_VL = sigmoid(
    "hy_v4_vl_text",
    "Hunyuan 4 VL",
    attention_targets=(*MLA, "self_attn.gate_proj"),
    since="5.24",
    rows=Rows(masks_by_position=False),
)
_MISTRAL_LARGE4 = softmax(
    "mistral_large4_text",
    "Mistral Large 4",
    attention_targets=MLA,
    shared_targets=SHARED_EXPERTS,
    renormalize=yes,
    scaling=scaled(),
    moe_layers=_sparse,
    check=_one_group,
    since="5.22",
    rows=Rows(padding="moves"),
)
_UNLIMITED_OCR = softmax(
    "unlimited_ocr_text",
    "Unlimited-OCR",
    shared_targets=SHARED_EXPERTS,
    renormalize=lambda config: False,
    scaling=scaled(),
    groups=_limited_groups,
    moe_layers=_sparse,
    since="5.20",
)

FAMILIES = (
    sigmoid(
        "bailing_hybrid",
        "Ling-3.0-Flash",
        attention_targets=(
            *MLA,
            *under("self_attn", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj"),
        ),
        since="5.20",
        rows=Rows(per_sequence=("BailingHybridDeltaAttention",)),
    ),
    sigmoid(
        "beam",
        "Beam",
        attention_targets=(*QKVO, "self_attn.gate_proj"),
        shared_targets=(),
        scaling=unscaled,  # its factor is applied after the experts
        since="5.21",
    ),
    sigmoid("dots3_note_text", "dots3.note (text)", attention_targets=MLA, since="5.23"),
    sigmoid(
        "flint",
        "Flint",
        shared_targets=SHARED_EXPERT,
        scaling=unscaled,
        groups=ungrouped,
        bias_export="none",
        since="5.21",
    ),
    composite("hy_v4_vl", "Hunyuan 4 VL", _HY_V4_VL),
    _INKLING2,
    composite("inkling2", "Inkling 2", _INKLING2),
    sigmoid(
        "kolibri1",
        "Kolibri 1",
        scaling=unscaled,
        groups=ungrouped,
        bias_on_logits=True,
        since="5.20",
    ),
    softmax(
        "lara_mini",
        "Lara Mini",
        # Its files fuse the delta nets' other projections in `in_proj`.
        attention_targets=(*QKVO, "linear_attn.out_proj"),
        shared_targets=SHARED_EXPERT,
        since="5.24",
        rows=Rows(per_sequence=("LaraMiniGatedDeltaNet",)),
    ),
    composite("mistral_large4", "Mistral Large 4", _MISTRAL_LARGE4),
    sigmoid(
        "sarvam_mla",
        "Sarvam-105B",
        attention_targets=MLA,
        moe_layers=after_dense_layers,
        since="5.24",
    ),
    sigmoid(
        "sarvam_moe",
        "Sarvam-30B",
        # Its files fuse the others in `query_key_value`.
        attention_targets=("self_attn.o_proj",),
        since="5.24",
    ),
    composite("unlimited_ocr", "Unlimited-OCR", _UNLIMITED_OCR),
)
