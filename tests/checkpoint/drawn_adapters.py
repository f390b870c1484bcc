"""Random factors in the files of other programs, and the checks of what they change.

Layouts read in PEFT 0.18.0, 0.19.1 and 0.21.2 (``lora/layer.py``), unsloth-zoo (``hf_utils.py``,
``saving_utils.py``, pull requests 1232 and 1269), axolotl (``cli/utils/lora_merge.py``,
``expert_parallel/shard.py``) and LLaMA-Factory (``model/adapter.py``).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.verify import verify_merge
from tests.checkpoint import helpers
from tests.checkpoint.helpers import logits

RANK, SCALE = 4, 3.0
PLAIN = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": RANK * SCALE,
    "target_modules": ["q_proj"],
}
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def same(found, wanted):
    assert (found - wanted).norm() < 1e-4 * wanted.norm()  # another packing gives 1 or so


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | config))
    named = {f"base_model.model.{key}": value for key, value in tensors.items()}
    save_file({key: value.contiguous() for key, value in named.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    return folder


def changed_by(base, deltas):
    model = helpers.load(base)
    with torch.no_grad():
        for name, delta in deltas.items():
            model.get_parameter(name).add_(delta)
    return logits(model)


def check(base, adapter, wanted, tmp_path):
    """Merge, verify, and the folder that PEFT reads, each against the logits ``wanted``."""
    assert (logits(helpers.load(base)) - wanted).norm() > 0.02 * wanted.norm()
    merged = tmp_path / f"merged_{base.name}"
    merge_adapter(base, adapter, merged)
    same(logits(helpers.load(merged)), wanted)
    folder = convert_adapter(adapter, base, tmp_path / f"peft_{adapter.name}", FORMS["peft"])
    same(logits(helpers.with_adapter(base, folder)), wanted)
    verify_merge(base, adapter, merged)


def on_linears(base, names, **config):
    """Factors on all matrices of the files whose last name is in ``names``, and the new values."""
    torch.manual_seed(11)
    stored = load_file(base / "model.safetensors")
    tensors, changed = {}, dict(stored)
    for name, value in stored.items():
        path = name.removesuffix(".weight")
        if value.ndim != 2 or path.rpartition(".")[2] not in names:
            continue
        a, b = torch.randn(RANK, value.shape[1]), torch.randn(value.shape[0], RANK) * 0.02
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        changed[name] = value + SCALE * b @ a
        if config.get("use_dora"):
            norms = torch.rand(value.shape[0]) + 0.5
            tensors[f"{path}.lora_magnitude_vector"] = norms
            changed[name] *= (norms / changed[name].norm(dim=1))[:, None]
    return tensors, changed
