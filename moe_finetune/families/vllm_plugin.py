"""vLLM's general plugin: what vLLM 0.32 lacks to serve every family here.

It loads plugins in every process that it starts, sometimes twice in one.
"""

from __future__ import annotations


def register() -> None:
    """Register the config of DeepSeek-MoE and mend rotary positions on the CPU; repeatable."""
    from vllm.platforms import current_platform

    from moe_finetune.families.deepseek_moe import register_config

    register_config()  # vLLM has the architecture DeepseekForCausalLM, but no config class for it
    if current_platform.is_cpu():
        _mend_cpu_rotary()


def _mend_cpu_rotary() -> None:
    """Replace, by vLLM's own extension point, a CPU kernel that is wrong for latent attention.

    vLLM 0.32's CPU kernel takes queries as (tokens, heads * size). The attention of DeepSeek-V2 and
    V3 hands it (tokens, heads, size) and gets wrong angles without an error. The native form, which
    computes the same in torch, is right for both.
    """
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if RotaryEmbedding.__name__ in op_registry_oot:
        return

    @RotaryEmbedding.register_oot(name=RotaryEmbedding.__name__)
    class CpuRotaryEmbedding(RotaryEmbedding):
        def forward_cpu(self, positions, query, key=None):
            if query.dim() == 3:
                return self.forward_native(positions, query, key)
            return super().forward_cpu(positions, query, key)
