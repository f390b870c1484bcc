"""Check ``config.json`` before any library reads it: sizes within bounds, and no code.

transformers takes ``_attn_implementation: owner/name`` in a config as a kernel to download from the
hub and run, and builds lists of length ``num_hidden_layers``.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from moe_finetune.errors import CheckpointError, MoeFinetuneError, UnsupportedModelError

DTYPES = ("float64", "float32", "float16", "bfloat16")
QUANTIZATION = "quantization_config"
READABLE = ("fp8", "compressed-tensors", "mxfp4")
"""Methods of a ``quantization_config`` that can be read, at least in some variants."""
UNQUANTIZED = (
    "use an unquantized checkpoint of the model, or one stored as fp8, compressed-tensors "
    "(4-bit pack-quantized) or mxfp4"
)
_METHODS = {"gptq": "GPTQ", "awq": "AWQ"}
# Kernels that torch has; any other name in a config is fetched from the hub.
_KERNELS = ("eager", "sdpa", "grouped_mm", "batched_mm")
_INSTALLED = (*_KERNELS, "flex_attention", "flash_attention_2", "flash_attention_3")
"""Those of packages that a user installs, too."""
_LARGEST = {
    "num_hidden_layers": 1_000, "first_k_dense_replace": 1_000, "num_nextn_predict_layers": 100,
    "num_experts": 1 << 15, "n_routed_experts": 1 << 15, "num_local_experts": 1 << 15,
    "num_experts_per_tok": 1 << 15, "n_shared_experts": 1_000, "n_group": 1 << 15,
    "topk_group": 1 << 15, "moe_layer_freq": 1_000, "decoder_sparse_step": 1_000,
    "hidden_size": 1 << 20, "intermediate_size": 1 << 22, "moe_intermediate_size": 1 << 22,
    "vocab_size": 1 << 26, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16, "q_lora_rank": 1 << 20, "kv_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 16, "qk_rope_head_dim": 1 << 16, "v_head_dim": 1 << 16,
    "max_position_embeddings": 1 << 30,
}  # fmt: skip
SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Published model types without a class -> the type whose class has their modules, as in vLLM."""
_UNLIMITED = "time_step_limit"
"""The range of Mamba's time steps, published without an upper limit."""
_MAY_BE_ZERO = (
    *("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),  # without latent attention
)
_MAY_BE_LISTS = ("moe_intermediate_size", "moe_layer_freq")  # a number for each layer


def check_config(config: Mapping[str, Any], file: object, quantized: bool = False) -> None:
    """Check the mapping of a ``config.json``; ``file`` begins the messages.

    ``quantized`` accepts a quantized checkpoint, whose format its reader checks.
    """
    for key, most in _LARGEST.items():
        value, least = config.get(key), 0 if key in _MAY_BE_ZERO else 1
        numbers = [value]
        if key in _MAY_BE_LISTS and isinstance(value, list):
            numbers, least = value, 0
        if value is not None and not all(type(n) is int and least <= n <= most for n in numbers):
            raise CheckpointError(
                f"{file}: {key} is {value!r:.60}; it must be a whole number from {least} to "
                f"{most:,}"
            )
    for key, value in config.items():
        if key != _UNLIMITED and not _finite(value):
            raise CheckpointError(f"{file}: {key} contains NaN or infinity; copy the file again")
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None and config[key] not in DTYPES:
            raise CheckpointError(
                f"{file}: {key} is {config[key]!r:.60}; it must be one of {', '.join(DTYPES)}"
            )
    _check_quantization(config, file, quantized)
    for key, name in _kernels(config):
        # Authors store their own preference, which is not followed: see asks_for_a_package.
        allowed = _INSTALLED if "attn" in key else _KERNELS
        check_kernel(name, f"{file}: {key}", CheckpointError, allowed)


def _check_quantization(config: Mapping[str, Any], file: object, quantized: bool) -> None:
    section, key = config.get(QUANTIZATION), QUANTIZATION
    if section is None and _is_mlx(config.get("quantization")):
        section, key = config["quantization"], "quantization"  # from older versions of MLX
    if section is None:
        return
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method not in READABLE:
        raise UnsupportedModelError(
            f"{file}: {key}: the checkpoint is quantized with {quantization_name(section)}, which "
            f"cannot be read; {UNQUANTIZED} (for merge: --base FOLDER)"
        )
    if not quantized:
        raise UnsupportedModelError(
            f"{file}: {key}: the checkpoint is stored as {method}, which only train, inspect and "
            "merge read; use the unquantized checkpoint of this model"
        )


def quantization_name(section: Any) -> str:
    """The name of the format in a ``quantization_config``."""
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method:
        return _METHODS.get(str(method), f"{method!r:.60}")
    return "MLX" if _is_mlx(section) else "an unnamed method"


def _is_mlx(section: Any) -> bool:
    return isinstance(section, dict) and {"group_size", "bits"} <= section.keys()


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_kernel(
    name: Any,
    file: object,
    error: type[MoeFinetuneError],
    allowed: tuple[str, ...] = _INSTALLED,
) -> None:
    """Raise ``error`` unless ``name`` is one of the ``allowed`` kernels; hub kernels never run."""
    if name is not None and name not in allowed:
        raise error(
            f"{file}: {name!r:.80} must be one of {', '.join(allowed)}; code from the hub is "
            "never executed, remove the key"
        )


def asks_for_a_package(config: Mapping[str, Any]) -> bool:
    """Whether config.json names an attention kernel of a package; without it transformers would
    fetch one from the hub."""
    return any(name in _INSTALLED and name not in _KERNELS for _, name in _kernels(config))


def _kernels(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key that chooses a kernel, at any depth, with its names."""
    for key, value in config.items():
        if key.removesuffix("_internal").endswith("_implementation"):
            for name in value.values() if isinstance(value, dict) else (value,):
                yield key, name
        elif isinstance(value, dict):
            yield from _kernels(value)
