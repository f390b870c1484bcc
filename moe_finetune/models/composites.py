"""Composites with a MoE language part, and language parts that exist only in a composite.

transformers nests a config of each part in the composite's. The language part trains on text; other
parts, such as a vision tower, stay unchanged.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from moe_finetune.models import family_table
from moe_finetune.models.family import UNREAD_POSITIONS, Family, Rows
from moe_finetune.models.family_rows import limited_groups, requires, scaled, sigmoid, softmax, yes

_OF_THE_CONFIG = [field.name for field in fields(Family) if callable(field.default)]


def composite(
    model_type: str,
    title: str,
    part: Family,
    name: str = "",
) -> Family:
    """The family of a composite around ``part``, the facts of its language part; its ``name``, if
    that is not the ``model_type``."""
    facts: dict[str, Any] = {fact: _of_language(getattr(part, fact)) for fact in _OF_THE_CONFIG}
    return replace(
        part,
        name=name or model_type,
        model_type=model_type,
        title=title,
        part=part.model_type,
        **facts,
    )


def _of_language(fact: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda config: fact(config.get_text_config())


_ALONE: dict[str, Family] = {f.model_type: f for f in (*family_table.CORE, *family_table.FAMILIES)}


_DEEPSEEK_OCR2 = softmax(
    "deepseek_ocr2_text",
    "DeepSeek-OCR 2",
    renormalize=lambda config: False,
    scaling=scaled(),
    groups=limited_groups,
)
_GLM4V = sigmoid("glm4v_moe_text", "GLM-4.5V", rows=UNREAD_POSITIONS)
_GLM5_NEXT = sigmoid(
    "glm5_next_text",
    "GLM-5 Next",
    rows=Rows(per_sequence=("Glm5NextTextLinearAttention", "Glm5NextTextAttention")),
)
_MISTRAL4 = softmax(
    "mistral4",
    "Mistral Small 4",
    scaling=scaled(),
    check=requires(n_group=(1,)),  # groups are taken by their two best experts
    rows=Rows(padding="moves"),
)
_QWEN3_VL = softmax(
    "qwen3_vl_moe_text",
    "Qwen3-VL-MoE",
    renormalize=yes,
)

PARTS = (_DEEPSEEK_OCR2, _GLM4V, _GLM5_NEXT, _MISTRAL4, _QWEN3_VL)

FAMILIES = (
    composite("aria", "Aria", _ALONE["aria_text"]),
    composite("deepseek_ocr2", "DeepSeek-OCR 2", _DEEPSEEK_OCR2),
    composite("gemma4", "Gemma 4", _ALONE["gemma4_text"]),
    composite("glm4v_moe", "GLM-4.5V", _GLM4V),
    composite("glm5_next", "GLM-5 Next", _GLM5_NEXT),
    composite("inkling_mm_model", "Inkling", _ALONE["inkling_text"]),
    composite("internvl", "InternVL3.5-30B-A3B", _ALONE["qwen3_moe"]),
    composite(
        "internvl", "InternVL3.5-GPT-OSS-20B-A4B", _ALONE["gpt_oss"], name="internvl_gpt_oss"
    ),
    composite("minimax_m3_vl", "MiniMax-M3", _ALONE["minimax_m3_vl_text"]),
    composite("mistral3", "Mistral Small 4", _MISTRAL4),
    composite(
        "nemotron_h_omni",
        "Nemotron 3 Omni",
        _ALONE["nemotron_h"],
    ),
    composite("qwen3_5_moe", "Qwen3.5-35B-A3B", _ALONE["qwen3_5_moe_text"]),
    composite("qwen3_vl_moe", "Qwen3-VL-30B-A3B", _QWEN3_VL),
    composite("qwen4_exp", "Qwen4-Exp", _ALONE["qwen4_exp_text"]),
)

LOOP = (
    "its layers run several times in a forward, of which losses and records would count one; "
    "inkling2 is supported"
)
NO_INTERFACE = "its experts do not follow transformers' experts interface"
REFUSED = {
    "deepseek_vl_v2": (
        "its config.json needs remote code, which is never run; for DeepSeek-OCR 2 use the "
        "files for transformers' class (model_type deepseek_ocr2, such as "
        "deepseek-community/DeepSeek-OCR-2)"
    ),
    "diffusion_gemma": "its language model denoises blocks and has no next-token loss",
    "ernie4_5_vl_moe": (
        "its files store text and vision experts in one list, which a merge cannot separate; "
        "ernie4_5_moe is supported"
    ),
    "inkling2_loop": LOOP,
    "inkling2_loop_text": LOOP,
    "kimi_k25": (
        "transformers 5.19 saves its layers under names that differ from the published ones; "
        "only its language model, a deepseek_v3, is supported"
    ),
    "llama4": NO_INTERFACE,
    "muse_spark": "its experts normalize their outputs, which the experts' products here do not",
    "nemotron3_5_transcribe": "it is a speech model; nemotron_h is supported",
    "qwen3_omni_moe": (
        "it consists of several language models, for text and speech; qwen3_vl_moe and "
        "qwen3_moe are supported"
    ),
    "qwen3_omni_moe_thinker": (
        "it is published only as part of qwen3_omni_moe; qwen3_vl_moe and qwen3_moe are supported"
    ),
    "step3p7": NO_INTERFACE,
}
"""Why other types with experts cannot be trained, by ``model_type``."""
