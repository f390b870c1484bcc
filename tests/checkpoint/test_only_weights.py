"""A checkpoint's folder is its weights: nothing else that lies in it is read as such."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune import cli
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import INDEX, SINGLE
from tests.checkpoint.helpers import adapter

IDS = torch.arange(4, 17).view(1, -1)


def logits(folder):
    with torch.no_grad():
        return load_model(folder, dtype="float32")(input_ids=IDS).logits


@pytest.fixture
def folder(tmp_path, tiny_checkpoint):
    return shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "qwen3_moe")


def split(folder):
    """The single file as two shards with an index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[:9], names[9:]), 1):
        file = f"model-{part:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_an_adapter_left_beside_the_weights_is_not_applied(folder, tmp_path, caplog):
    """from_pretrained would add it, and merges, which read the files, would not."""
    alone = logits(folder)
    left = adapter(folder, tmp_path / "left", seed=8, target_parameters=[])
    merged_before = merge_adapter(folder, adapter(folder, tmp_path / "own"), tmp_path / "before")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(left / file, folder)
    caplog.clear()
    assert torch.equal(logits(folder), alone)
    lines = [r.message for r in caplog.records if "adapter_config.json" in r.message]
    assert len(lines) == 1 and "is not applied" in lines[0] and "lora.start" in lines[0]
    merge_adapter(folder, tmp_path / "own", tmp_path / "after")
    result = verify_merge(folder, tmp_path / "own", tmp_path / "after")
    assert result.layers and merged_before.changed
    weights = [load_file(tmp_path / name / SINGLE) for name in ("before", "after")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert cli.main(["convert", str(folder), "--output", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy" / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()
    assert not (tmp_path / "copy" / "adapter_config.json").exists()
    assert not (tmp_path / "after" / "adapter_config.json").exists()


def test_shards_and_a_single_file_must_agree(folder, capsys):
    alone = logits(folder)
    tensors = split(folder)
    open_checkpoint(folder)  # a copy of the same weights
    assert torch.equal(logits(folder), alone)
    name = next(name for name in tensors if "experts.3.up" in name)
    tensors[name][2, 1] += 1
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors has other weights than the sh"):
        open_checkpoint(folder)
    assert cli.main(["inspect", str(folder)]) == 2
    assert "remove the one that does not belong" in capsys.readouterr().err
    (folder / SINGLE).unlink()
    assert torch.equal(logits(folder), alone)
