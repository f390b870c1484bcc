"""An adapter folder in PEFT's LoRA format: config, header, and ``moe_finetune.json``.

Of an adapter of chosen experts (ESFT) that file has ``chosen_experts``; the others' factors are
zero. A training's checkpoints have ``experts`` in its place, and factors for these n only, packed
as PEFT packs a stack: ``lora_A`` (n·r, in) expert slowest, ``lora_B`` (out, r·n) expert fastest.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from moe_finetune.checkpoint.adapters.config import read_config
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.errors import AdapterError, CheckpointError
from moe_finetune.io.checkpoint_files import COPY_AGAIN, tensors_of
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import FLOATS, INTEGERS, TensorInfo, read_header

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
METADATA = "moe_finetune.json"
BIAS_FILE = "router_bias.safetensors"
AUTOMODEL_FILE = "automodel_peft_config.json"
"""NeMo Automodel writes it next to PEFT's config."""
PREFIX = "base_model.model."
_ADAPTER_NAME = re.compile(r"\.(?:lora_\w+|modules_to_save)\.default(?:\.|$)")
_COPIES = (".modules_to_save.weight", ".original_module.weight")
SHARED_OUTER = "shared_outer"
"""Key of ``moe_finetune.json`` in training states: which factors of all experts are stored once."""
_LAYOUT = "paramwrapper_layout"
_LAYOUTS = {"peft-0.19.1": "0.19.1", "peft-0.18": "0.18"}
"""Automodel's names of the two packings of stacks, and a version of PEFT that has each."""
BASE_KEY = "base_sha256"
"""Key of ``moe_finetune.json``: the fingerprint of the base's tensors."""
STORED_KEY = "stored_base_sha256"
"""The same for a quantized base; the adapter may also be merged into the unquantized one."""

log = logging.getLogger(__name__)
_warned: set[Path] = set()
_Count = Annotated[int, Field(strict=True, gt=0)]


@dataclass(frozen=True)
class AdapterMetadata:
    """Contents of ``moe_finetune.json``.

    ``experts``: decoder layer -> experts with factors, in packing order; None if all have them.
    ``experts_dropout``: on the routed experts, which PEFT's config cannot hold.
    """

    experts: dict[int, tuple[int, ...]] | None = None
    experts_dropout: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    """One adapter: its config, its tensors by key without PEFT's prefix, and its metadata.

    ``tables``: integer tensors of a saved module, which training does not change.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: AdapterMetadata
    tables: dict[str, TensorInfo] = field(default_factory=dict)


def read_adapter(path: str | Path) -> Adapter:
    """An adapter folder as its maker wrote it, by its headers only."""
    folder = Path(path)
    if not folder.is_dir():
        raise AdapterError(f"{folder}: no such adapter folder")
    if not (folder / CONFIG).is_file():
        raise AdapterError(f"{folder}: {CONFIG} is missing; give an adapter's folder")
    if not (folder / WEIGHTS).is_file():
        raise AdapterError(f"{folder}: {WEIGHTS} is missing; {_instead_of_weights(folder)}")
    config = read_config(folder / CONFIG)
    if not config.get("peft_version") and (version := _version_of_automodel(folder)):
        config["peft_version"] = version
    header = read_header(folder / WEIGHTS, AdapterError)
    tensors: dict[str, TensorInfo] = {}
    tables: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        if not name.startswith(PREFIX):
            raise AdapterError(
                f"{info.file}: key '{name}' does not start with '{PREFIX}', as PEFT's do; if no "
                f"key does, put it before all of them: save_file({{'{PREFIX}' + key: tensor for "
                "key, tensor in load_file(file).items()}, file)"
            )
        if _ADAPTER_NAME.search(name):
            raise AdapterError(
                f"{info.file}: key '{name}' contains '.default', the name of an adapter in PEFT's "
                "model, which its files omit; save it with model.save_pretrained, or remove it: "
                "save_file({key.replace('.default', ''): tensor for key, tensor in "
                "load_file(file).items()}, file)"
            )
        target = tables if info.dtype in INTEGERS and ".lora_" not in name else tensors
        if target is tensors and info.dtype not in FLOATS:
            raise AdapterError(f"{info.file}: '{name}' is {info.dtype}, not a float tensor")
        target[name.removeprefix(PREFIX)] = info
    for module in [key.removesuffix(_COPIES[0]) for key in tensors if key.endswith(_COPIES[0])]:
        if f"{module}.weight" in tensors:  # PEFT saves a resized embedding three times
            for copy in _COPIES:
                tensors.pop(module + copy, None)
    if not tensors:
        raise AdapterError(f"{folder / WEIGHTS}: contains no tensors; copy the adapter again")
    metadata = read_metadata(folder)
    if SHARED_OUTER in metadata.extra:
        tensors |= _repeated(folder / METADATA, tensors, metadata.extra[SHARED_OUTER])
    return Adapter(folder, config, tensors, metadata, tables)


def _instead_of_weights(folder: Path) -> str:
    """What to do with a folder without ``adapter_model.safetensors``."""
    if (folder / "adapter_model.bin").is_file():
        return "save it again as safetensors"
    if parts := sorted(file.name for file in folder.glob("adapter_model-*.safetensors")):
        return (
            f"its tensors are in {len(parts)} files ({parts[0]} and so on); join them: save_file("
            "{key: tensor for file in files for key, tensor in load_file(file).items()}, "
            f"'{WEIGHTS}')"
        )
    return "copy the adapter again, or give an adapter's folder"


def _repeated(file: Path, tensors: Mapping[str, TensorInfo], shared: Any) -> dict[str, TensorInfo]:
    """The shared factors of a training state of ``lora.shared_outer``, as PEFT packs them.

    ``shared``: what ``file`` says of them, ``{module: [A or B, number of experts]}``.
    """
    from moe_finetune.checkpoint.weight_files import computed

    try:
        sides = TypeAdapter(dict[str, tuple[Literal["A", "B"], _Count]]).validate_python(shared)
    except ValidationError:
        raise AdapterError(
            f"{file}: '{SHARED_OUTER}' must map modules to [A or B, number of experts]; "
            f"{COPY_AGAIN}"
        ) from None
    repeated: dict[str, TensorInfo] = {}
    for path, (side, experts) in sides.items():
        key = f"{path}.lora_{side}.weight"
        info = tensors.get(key)
        if info is None or len(info.shape) != 2:
            continue  # refused where the adapter is opened, with its base
        rows, columns = info.shape
        shape = (rows * experts, columns) if side == "A" else (rows, columns * experts)
        repeated[key] = computed(key, info.dtype, shape, partial(_repeat, info, experts, side))
    return repeated


def _repeat(info: TensorInfo, experts: int, side: Literal["A", "B"]) -> Tensor:
    from moe_finetune.checkpoint.weight_files import read_tensor
    from moe_finetune.moe.experts.lora_shared import repeat  # PEFT takes seconds to import

    return repeat(read_tensor(info), experts, side)


def read_bias(folder: Path) -> dict[int, list[float]] | None:
    """The loss-free routing bias in an adapter's folder, by decoder layer; None without one."""
    file = folder / BIAS_FILE
    if not file.is_file():
        if read_metadata(folder).extra.get("router_bias"):
            raise AdapterError(f"{file}: is missing; copy the adapter's folder again")
        return None
    from moe_finetune.checkpoint.weight_files import read_tensor

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


def write_metadata(
    folder: str | Path,
    experts: Mapping[int, Sequence[int]] | None = None,
    experts_dropout: float = 0.0,
    **extra: Any,
) -> Path:
    """Write ``moe_finetune.json`` into an adapter folder and return its path."""
    content: dict[str, Any] = {"experts_dropout": experts_dropout, **extra}
    if experts is not None:
        content["experts"] = {str(k): [int(e) for e in experts[k]] for k in sorted(experts)}
    file = Path(folder) / METADATA
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file


def _version_of_automodel(folder: Path) -> str | None:
    """The version of PEFT whose packing of stacks Automodel says it wrote; None if it does not."""
    file = folder / AUTOMODEL_FILE
    layout = read_object(file, AdapterError, COPY_AGAIN).get(_LAYOUT) if file.is_file() else None
    if layout is None:
        return None
    if str(layout) not in _LAYOUTS:
        raise AdapterError(
            f"{file}: {_LAYOUT} is {layout!r:.60}, which is none of {', '.join(_LAYOUTS)}; add the "
            f"version of PEFT that packs its stacks so to {CONFIG}, such as "
            '"peft_version": "0.19.1"'
        )
    return _LAYOUTS[layout]


def read_metadata(folder: str | Path) -> AdapterMetadata:
    """Read ``moe_finetune.json``; an adapter without the file gets the defaults."""
    file = Path(folder) / METADATA
    if not file.is_file():
        return AdapterMetadata()
    content = read_object(file, AdapterError, COPY_AGAIN)
    experts = content.pop("experts", None)
    dropout = content.pop("experts_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise AdapterError(
            f"{file}: experts_dropout is {dropout!r:.60}; it must be a number from 0 to below 1"
        )
    return AdapterMetadata(_experts(file, experts), float(dropout), content)


def _experts(file: Path, value: Any) -> dict[int, tuple[int, ...]] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(
        re.fullmatch(r"0|[1-9][0-9]{0,8}", layer)
        and isinstance(ids, list)
        and all(type(expert) is int and expert >= 0 for expert in ids)
        and 0 < len(ids) == len(set(ids))
        for layer, ids in value.items()
    ):
        raise AdapterError(
            f"{file}: 'experts' must map a layer's number to a list of different expert numbers"
        )
    return {int(layer): tuple(ids) for layer, ids in value.items()}


def check_belongs(adapter: Adapter, base: Checkpoint) -> None:
    """Check that ``adapter``, whose tensors fit ``base``, is finite and made for it."""
    from moe_finetune.checkpoint.weight_files import (
        Computed,
        check_values,
        finite,
        not_finite,
        read_tensor,
    )

    _check_tables(adapter, base)
    _check_base(adapter, base)
    remedy = "the training diverged; use an earlier checkpoint"
    stored = [info for info in adapter.tensors.values() if not isinstance(info, Computed)]
    check_values(stored, AdapterError, remedy)
    for key, info in adapter.tensors.items():
        if isinstance(info, Computed) and not finite(read_tensor(info)):
            raise AdapterError(not_finite(adapter.folder / WEIGHTS, key, remedy))


def _check_base(adapter: Adapter, base: Checkpoint) -> None:
    from moe_finetune.checkpoint.weight_files import check_values, fingerprint

    key, tensors = named_tensors(base)
    recorded = adapter.metadata.extra.get(key)
    if recorded is None:
        folder = adapter.folder.absolute()
        if folder not in _warned:
            _warned.add(folder)
            log.warning(
                "%s: does not record its base (%s of %s), so only its shapes can be checked "
                "against %s",
                adapter.folder,
                key,
                METADATA,
                base.folder,
            )
        return
    actual = fingerprint(tensors)
    if recorded != actual:
        # A base damaged since training also differs; its damaged tensor is then the better message.
        check_values(tensors, CheckpointError, "copy the checkpoint again")
        raise AdapterError(
            f"{adapter.folder}: was trained on another base: the tensors of {base.folder} have "
            f"the fingerprint {actual[:12]}, {METADATA} names {str(recorded)[:12]}; give the base "
            "that it was trained on (merge: --base)"
        )


def named_tensors(base: Checkpoint) -> tuple[str, list[TensorInfo]]:
    """The key of the base's fingerprint in ``moe_finetune.json``, and the tensors it covers."""
    if base.quantized is None:
        return BASE_KEY, list(base.tensors.values())
    return STORED_KEY, list(tensors_of(base.files).values())


def _check_tables(adapter: Adapter, base: Checkpoint) -> None:
    """Check that integer tensors of a saved module equal the base's, which a merge keeps."""
    from moe_finetune.checkpoint.weight_files import read_tensor

    for key, info in adapter.tables.items():
        name = base.names.files.get(key, [key])[0]
        table = base.tensors.get(name)
        if (
            table is None
            or table.shape != info.shape
            or (read_tensor(table) != read_tensor(info)).any()
        ):
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' differs from the base's '{name}'; the "
                "adapter was trained on another base"
            )
