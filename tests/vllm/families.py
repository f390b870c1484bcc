"""Which families' tiny checkpoints vLLM serves in the tests."""

from typing import Any

from tests.support import tiny

# vLLM's kernels on a CPU have heads of 32 and more, and latent attention of 512 + 64.
_HEADS: dict[str, Any] = {"hidden_size": 192}
_LATENT: dict[str, Any] = _HEADS | {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    "v_head_dim": 32,
    "head_dim": 64,
}
SERVED: dict[str, dict[str, Any]] = {
    "cohere2_moe": _HEADS | {"tie_word_embeddings": True},  # vLLM's class has no other head
    "exaone_moe": _HEADS,
    "glm4_moe": _HEADS,
    "glm4_moe_lite": _LATENT,
    "granitemoe": _HEADS | {"seed": 5},  # seed 0 has two experts 5e-6 apart at one token
    "granitemoe_swa": _HEADS,
    "granitemoeshared": _HEADS,
    "qwen2_moe": _HEADS | {"initializer_range": 0.11, "seed": 5},
}
"""Families of the table with what their tiny configs need for vLLM."""

OTHERS = {
    "ernie4_5_moe": "its CPU router leaves the bias out",
    "gpt_oss": "has it; on a CPU not for unquantized experts with a bias",
    "nemotron_h": "has it; on a CPU not for experts without a gate",
    "qwen3_next": "has it; on a CPU in bfloat16 only",
}
"""Families of which vLLM has the class, and whose tiny checkpoints it serves otherwise."""

TESTED = (*tiny.FAMILY_NAMES, *SERVED)
