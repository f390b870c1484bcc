"""vLLM's general plugin: what vLLM 0.32 needs to serve every family, and to end with its parent.

vLLM loads plugins in every process that it starts, sometimes twice.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

_WATCHER = "moe-finetune: ends with the parent"


def register() -> None:
    """Register the config of DeepSeek-MoE and fix rotary positions on the CPU; may be repeated.

    In a process that vLLM started (an engine or worker), also make it end with its parent.
    """
    die_with_parent()
    from vllm.platforms import current_platform

    from moe_finetune.models.deepseek_moe import register_config

    register_config()  # vLLM has the architecture DeepseekForCausalLM, but no config class for it
    if current_platform.is_cpu():
        _fix_cpu_rotary()


def die_with_parent() -> None:
    """End this ``multiprocessing`` process when its parent ends; may be repeated.

    A killed parent cannot stop its engines. The kernel's parent-death signal does not help, because
    it is sent when the *thread* that started the process ends.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name=_WATCHER, daemon=True).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _fix_cpu_rotary() -> None:
    """Replace, through vLLM's extension point, a CPU kernel that is wrong for latent attention.

    vLLM 0.32's CPU kernel takes queries as (tokens, heads * size). The attention of DeepSeek-V2 and
    V3 passes (tokens, heads, size) and gets wrong angles without an error. The native torch form is
    correct for both.
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
