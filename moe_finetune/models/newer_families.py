"""Families whose classes came after transformers 5.19; facts from each class in 5.24."""

from moe_finetune.models.composites import composite
from moe_finetune.models.family import QKVO, Rows, under
from moe_finetune.models.family_rows import (
    limited_groups,
    requires,
    scaled,
    sigmoid,
    softmax,
    ungrouped,
    unscaled,
    yes,
)

MLA = under(
    "self_attn", "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
)

_INKLING2 = sigmoid(
    "inkling2_text",
    "Inkling 2 (text)",
    attention_targets=("self_attn.q_proj.linear", "self_attn.o_proj.linear"),
    renormalize=yes,
    groups=ungrouped,
    since="5.24",  # its projections have other names in 5.23
    rows=Rows(per_sequence=("Inkling2ShortConvolution", "Inkling2DynamicShortConvolution")),
)
_HY_V4_VL = sigmoid(
    "hy_v4_vl_text",
    "Hunyuan 4 VL",
    since="5.24",
    rows=Rows(masks_by_position=False),
)
_MISTRAL_LARGE4 = softmax(
    "mistral_large4_text",
    "Mistral Large 4",
    renormalize=yes,
    scaling=scaled(),
    check=requires(n_group=(1,)),  # groups are taken by their two best experts
    since="5.22",
    rows=Rows(padding="moves"),
)
_UNLIMITED_OCR = softmax(
    "unlimited_ocr_text",
    "Unlimited-OCR",
    renormalize=lambda config: False,
    scaling=scaled(),
    groups=limited_groups,
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
        scaling=unscaled,  # its factor is applied after the experts
        since="5.21",
    ),
    sigmoid("dots3_note_text", "dots3.note (text)", attention_targets=MLA, since="5.23"),
    sigmoid(
        "flint",
        "Flint",
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
        since="5.24",
        rows=Rows(per_sequence=("LaraMiniGatedDeltaNet",)),
    ),
    composite("mistral_large4", "Mistral Large 4", _MISTRAL_LARGE4),
    sigmoid(
        "sarvam_mla",
        "Sarvam-105B",
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
