"""An adapter folder in PEFT's LoRA format: config and header; tensors are read on demand."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.adapter_metadata import AdapterMetadata, read_metadata
from moe_finetune.errors import AdapterError
from moe_finetune.io.checkpoint_files import COPY_AGAIN
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo, read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BIAS_FILE = "router_bias.safetensors"
PREFIX = "base_model.model."
# Options that change what the factors mean; a merge that ignored them would be silently wrong.
_REFUSED = (
    "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "megatron_config",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip

_KEEP_BASE = ("gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights`` that leave the base's weights as they are."""


@dataclass(frozen=True)
class Adapter:
    """One adapter folder.

    Attributes:
        config: ``adapter_config.json`` as a mapping.
        tensors: stored tensors by key, without PEFT's ``base_model.model.`` prefix.
        metadata: content of ``moe_finetune.json``.
        tables: integer tensors of a saved module, which training does not change.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: AdapterMetadata
    tables: dict[str, TensorInfo] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(info.size for info in self.tensors.values())


def open_adapter(path: str | Path | Adapter) -> Adapter:
    """Open an adapter folder written by PEFT (or by this toolkit), reading headers only.

    An adapter that is already open is returned unchanged.

    Raises:
        AdapterError: the folder or a file is missing or damaged, or the adapter's type cannot be
            merged as LoRA.
    """
    if isinstance(path, Adapter):
        return path
    folder = Path(path)
    if not folder.is_dir():
        raise AdapterError(f"{folder}: no such adapter folder")
    if not (folder / CONFIG).is_file():
        raise AdapterError(f"{folder}: {CONFIG} is missing; give an adapter's folder")
    if not (folder / WEIGHTS).is_file():
        hint = "; save it again as safetensors" if (folder / "adapter_model.bin").is_file() else ""
        raise AdapterError(f"{folder}: {WEIGHTS} is missing{hint}")
    config = _read_config(folder / CONFIG)
    header = read_header(folder / WEIGHTS, AdapterError)
    tensors: dict[str, TensorInfo] = {}
    tables: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        if not name.startswith(PREFIX):
            raise AdapterError(f"{info.file}: key '{name}' does not start with '{PREFIX}'")
        target = tables if info.dtype in INTEGERS and ".lora_" not in name else tensors
        if target is tensors and info.dtype not in FLOATS:
            raise AdapterError(f"{info.file}: '{name}' is {info.dtype}, not a float tensor")
        target[name.removeprefix(PREFIX)] = info
    if not tensors:
        raise AdapterError(f"{folder / WEIGHTS}: contains no tensors; copy the adapter again")
    return Adapter(folder, config, tensors, read_metadata(folder), tables)


def check_finite(adapter: Adapter) -> None:
    """Read every tensor once; raise AdapterError for the first one with a NaN or infinity."""
    from moe_finetune.checkpoint.files import check_values

    remedy = "the training diverged; use an earlier checkpoint"
    check_values(adapter.tensors.values(), AdapterError, remedy)


def read_bias(folder: Path) -> dict[int, list[float]] | None:
    """The loss-free routing bias in an adapter's folder, by decoder layer; None without one.

    Raises:
        AdapterError: the file is damaged, or contains anything but one finite vector for each
            layer.
    """
    file = folder / BIAS_FILE
    if not file.is_file():
        if read_metadata(folder).extra.get("router_bias"):
            raise AdapterError(f"{file}: is missing; copy the adapter's folder again")
        return None
    from moe_finetune.checkpoint.files import read_tensor

    bias: dict[int, list[float]] = {}
    for name, info in read_header(file, AdapterError).tensors.items():
        head, _, layer = name.partition(".")
        if head != "bias" or not layer.isdigit() or len(info.shape) != 1:
            raise AdapterError(f"{file}: '{name}' is not the bias of a layer (bias.N)")
        if info.dtype not in FLOATS:
            raise AdapterError(f"{file}: '{name}' is {info.dtype}, not a float tensor")
        values = read_tensor(info).tolist()
        if not all(map(math.isfinite, values)):
            raise AdapterError(f"{file}: '{name}' contains NaN or infinity; use an earlier adapter")
        bias[int(layer)] = values
    return bias


def _read_config(file: Path) -> dict[str, Any]:
    config = read_object(file, AdapterError, COPY_AGAIN)
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise AdapterError(f"{file}: peft_type is {kind}; only LoRA adapters (LORA) can be merged")
    for key in _REFUSED:
        if config.get(key):
            raise AdapterError(
                f"{file}: '{key}' is set; moe-finetune cannot merge such an adapter; merge it "
                "with PEFT"
            )
    start = config.get("init_lora_weights", True)
    if start not in (True, False, None, *_KEEP_BASE):
        raise AdapterError(
            f"{file}: init_lora_weights is {start!r:.60}, which changes the base's weights too; "
            "convert the adapter to an ordinary one with PEFT"
        )
    for key in ("target_modules", "exclude_modules", "target_parameters", "modules_to_save"):
        names = config.get(key) or []
        listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not listed and not isinstance(names, str):
            raise AdapterError(f"{file}: {key} must be a list of names, not {names!r:.60}")
    ranks = {"r": config.get("r")} | _patterns(config, "rank_pattern", file)
    alphas = {"lora_alpha": config.get("lora_alpha")} | _patterns(config, "alpha_pattern", file)
    for key, rank in ranks.items():
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"{file}: '{key}' must be a positive whole number, not {rank!r:.60}")
    for key, alpha in alphas.items():
        if not isinstance(alpha, int | float) or alpha is True or not 0 < alpha < math.inf:
            raise AdapterError(f"{file}: '{key}' must be a positive number, not {alpha!r:.60}")
    return config


def _patterns(config: dict[str, Any], key: str, file: Path) -> dict[str, Any]:
    patterns = config.get(key) or {}
    try:
        for pattern in patterns:
            re.compile(pattern)
        return dict(patterns)
    except (re.error, TypeError, ValueError) as error:
        raise AdapterError(
            f"{file}: {key} must map regular expressions to numbers ({error})"
        ) from None
