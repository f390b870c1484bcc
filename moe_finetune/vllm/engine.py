"""vLLM in this process as an lm-eval model: one engine for many tasks."""

import gc
import os
from pathlib import Path
from typing import Any

from moe_finetune.errors import EvaluationError
from moe_finetune.io.environment import package_versions
from moe_finetune.io.terminal import terminal
from moe_finetune.vllm.install import CPU_KV_CACHE, is_cpu_build, require_vllm

AUTO_FIT = -1
"""vLLM's ``max_model_len`` for the longest context that its cache has room for."""
LONGER = (
    "a longer context takes vllm.max_model_len (--vllm max_model_len=N) and room for it: "
    "VLLM_CPU_KVCACHE_SPACE=GIB on a CPU, vllm.gpu_memory_utilization on a GPU"
)


def engines_environment() -> dict[str, str]:
    """Environment of a process that only runs engines, one after the other.

    With the CPU build the engines run in that process, which imports vLLM once, and nothing is
    compiled.
    """
    if not is_cpu_build():
        return {}
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}


def engine_arguments(
    overrides: dict[str, Any], dtype: str = "auto", seed: int = 0
) -> dict[str, Any]:
    """Return the arguments of the engine: ours, then the user's on top.

    The context is as long as the key-value cache allows, at most the checkpoint's own: a checkpoint
    of 128k tokens would not start otherwise. On the CPU build the engine runs eagerly (compiling
    costs more than an evaluation) and in float32 by default, with a key-value cache of 1 GiB unless
    ``VLLM_CPU_KVCACHE_SPACE`` is set.
    """
    cpu = is_cpu_build()
    arguments: dict[str, Any] = {"dtype": dtype, "seed": seed}
    if int(overrides.get("data_parallel_size") or 1) == 1:
        arguments["max_model_len"] = AUTO_FIT
    if cpu:
        for name, value in CPU_KV_CACHE.items():
            os.environ.setdefault(name, value)
        arguments |= {"enforce_eager": True}
        if dtype == "auto":
            arguments["dtype"] = "float32"
    else:
        arguments |= {"gpu_memory_utilization": 0.9}
    merged = arguments | overrides
    if cpu and merged["dtype"] == "float32":
        # On processors with AMX vLLM selects a kernel for latent attention without float32 support;
        # models with ordinary attention ignore this.
        merged.setdefault("attention_backend", "CPU_MLA")
    if merged.get("trust_remote_code"):
        raise EvaluationError("vllm.trust_remote_code: remote code is never executed; remove it")
    if int(merged.get("data_parallel_size") or 1) > 1 and merged.get("enable_expert_parallel"):
        raise EvaluationError(
            "vllm: data_parallel_size > 1 and enable_expert_parallel cannot be used together in "
            "process; serve the checkpoint ('moe-finetune serve') and use backend 'server'"
        )
    return merged


def open_vllm(
    folder: Path,
    overrides: dict[str, Any],
    batch_size: int | str = "auto",
    dtype: str = "auto",
    seed: int = 0,
) -> tuple[Any, dict[str, Any]]:
    """Start one engine for the checkpoint in ``folder`` (20-40 s), as lm-eval's model with all
    settings that can change a reply.
    """
    require_vllm()
    arguments = engine_arguments(overrides, dtype, seed)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from lm_eval.models.vllm_causallms import VLLM

    silent = {"trust_remote_code": False, "use_tqdm_on_load": False}
    try:
        lm = VLLM(pretrained=str(folder), batch_size=batch_size, **{**silent, **arguments})
    except (RuntimeError, ValueError, TypeError) as error:
        raise EvaluationError(
            f"vLLM cannot load {folder} with {arguments}: {error}. If memory is short: {LONGER}"
        ) from error
    if arguments.get("max_model_len") == AUTO_FIT:
        lm._max_length = None  # asks the engine
        config = lm.model.llm_engine.model_config.hf_text_config
        context = getattr(config, "max_position_embeddings", None) or 0
        if lm.max_length < context:
            terminal().say(
                f"vLLM's cache has room for {lm.max_length:,} of the checkpoint's {context:,} "
                f"tokens of context; {LONGER}"
            )
    return lm, {
        "backend": "vllm",
        "batch_size": batch_size,
        "engine": arguments,
        "max_length": lm.max_length,
        "versions": package_versions("lm-eval", "vllm", "torch"),
    }


def shutdown(lm: Any) -> None:
    """Stop the engine and free its memory, so that another can be opened in this process."""
    from vllm import envs
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = getattr(getattr(lm, "model", None), "llm_engine", None)
    core = getattr(engine, "engine_core", None)
    if core is not None:
        core.shutdown()
    del engine, core
    if hasattr(lm, "model"):
        del lm.model
    gc.collect()
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:  # the engine was in this process
        cleanup_dist_env_and_memory()
