"""Formats of weights that the package does not read, recognized by names of files and tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.io.check_config import UNQUANTIZED
from moe_finetune.io.checkpoint_files import COPY_AGAIN
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import TensorInfo

MODELOPT = "hf_quant_config.json"
_MODELOPT_SCALES = ("input_scale", "weight_scale_2", "k_scale", "v_scale")


def check_readable(folder: Path, tensors: Mapping[str, TensorInfo], form: Any = None) -> None:
    """Refuse, by tensor names, a format that the reader of ``form`` does not know.

    Without this, scales of another format would be called tensors of another checkpoint.
    """
    declared = _modelopt_name(folder)
    for name in tensors:
        method = _packed_by(name, tensors, form)
        if method is None:
            continue
        raise UnsupportedModelError(
            f"{folder}: '{name}' is part of a tensor quantized with {declared or method}, which "
            f"cannot be read; {UNQUANTIZED} (for merge: --base FOLDER)"
        )


def _packed_by(name: str, tensors: Mapping[str, TensorInfo], form: Any) -> str | None:
    """The format that the name of a tensor shows, if ``form`` is another one."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "qweight":
        return "GPTQ" if f"{stem}.g_idx" in tensors else "AWQ or GPTQ"
    if leaf == "scales" and f"{stem}.biases" in tensors:
        return "MLX"
    if ".switch_mlp." in name:
        return "MLX, or in its layout of floats"
    if form is None and leaf in _MODELOPT_SCALES:
        return "ModelOpt's FP8 or NVFP4"
    if leaf.endswith("_scale_inv") and (form is None or leaf != "weight_scale_inv"):
        return "fp8 in stacks of experts" if leaf != "weight_scale_inv" else "fp8"
    if form is None and leaf in ("weight_packed", "weight_scale"):
        return "compressed-tensors"
    if form is None and leaf.endswith("_blocks") and f"{name[:-7]}_scales" in tensors:
        return "mxfp4"
    return None


def _modelopt_name(folder: Path) -> str | None:
    """What ModelOpt's own file declares; such releases may have no ``quantization_config``."""
    file = folder / MODELOPT
    if not file.is_file():
        return None
    section = read_object(file, CheckpointError, COPY_AGAIN).get("quantization")
    algorithm = section.get("quant_algo") if isinstance(section, dict) else None
    return f"ModelOpt's {algorithm or 'format'} ({MODELOPT})"
