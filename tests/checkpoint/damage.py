"""Damage to the files of a checkpoint or an adapter, and the refusal that it must meet."""

import json

import pytest
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.merge import merge_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def configure(file, **changes):
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit(file, change):
    """Change the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refuse(base, adapter, tmp_path, error, *parts):
    """The merge raises ``error`` whose message has all ``parts``; no file appears or changes."""
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(error) as caught:
        merge_adapter(base, adapter, tmp_path / "out")
    for part in parts:
        assert str(part) in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "out").exists()
