"""Dense checkpoints, which `eval` and `inspect` read so that a MoE is compared with its parent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.load_model import read_weights
from moe_finetune.checkpoint.open import check_folder
from moe_finetune.errors import EvaluationError
from moe_finetune.io.checkpoint_files import read_config, read_headers
from moe_finetune.models.config_and_tokenizer import parse_config
from moe_finetune.models.family_lookup import DENSE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_finetune.io.safetensors_header import Header


@dataclass(frozen=True)
class DenseCheckpoint:
    """A dense checkpoint's folder, transformers' config of it and the headers of its files."""

    folder: Path
    model_config: PreTrainedConfig
    files: dict[str, Header]

    def load(self, dtype: str = "auto", device_map: Any = None) -> Any:
        """The causal language model in eval mode; no weight stays random."""
        options = {"dtype": dtype, "device_map": device_map}
        return read_weights(self.folder, self.model_config, **options)


def is_dense(folder: Path) -> bool:
    """Return whether the folder's ``config.json`` names a dense type that is read here."""
    return read_config(folder, quantized=True).get("model_type") in DENSE


def open_dense(folder: Path, values: bool = False) -> DenseCheckpoint:
    """Open and check a dense checkpoint; ``values`` reads every tensor and refuses NaN."""
    read_config(folder)  # which refuses a quantized one
    config = parse_config(folder)
    check_folder(folder, config, values)
    return DenseCheckpoint(folder, config, read_headers(folder))


def refuse_adapter(folder: Path) -> None:
    """Raise EvaluationError for an adapter of a dense model."""
    raise EvaluationError(
        f"{folder} is dense, and only adapters of MoE models are applied here; merge the adapter "
        "with PEFT's merge_and_unload, and evaluate the result"
    )
