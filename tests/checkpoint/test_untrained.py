"""MTP heads as they are published: accepted, counted, carried byte for byte; strangers are not."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from moe_finetune.checkpoint.check_tensors import MTP, OTHER
from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint, stale_head
from moe_finetune.errors import CheckpointError
from moe_finetune.models import FAMILIES
from moe_finetune.training.before.inspect_checkpoint import inspect_checkpoint
from tests.quantization.formats import as_fp8, packs, rewrite
from tests.support import names_on_disk
from tests.support.tiny_adapter import adapted
from tests.support.tiny_heads import HEADS, WEIGHTS, carries, names_of, with_head


@pytest.mark.parametrize("family", HEADS)
def test_a_published_head_is_counted(family, tmp_path):
    base, names = tmp_path / "base", names_of(family)
    model, head = with_head(family, base, names)
    opened = open_checkpoint(base)
    assert dict(opened.untrained) == dict.fromkeys(names, MTP)
    assert tuple(opened.experts) == FAMILIES[family].places(model.config).moe_layers
    size = sum(tensor.nbytes for tensor in head.values())
    assert opened.parts_left_out() == {MTP: (len(names), size)}


# Layers after the last, heads under names of their own, several of them.
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "nemotron_h", "minimax_m2"])
def test_a_published_head_is_carried(family, tmp_path):
    base, names = tmp_path / "base", names_of(family)
    model, head = with_head(family, base, names)
    adapted(model, "lora").save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    report = merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert carries(tmp_path / "merged", head)
    (line,) = report.notes
    assert line.startswith(f"the MTP head ({len(names)} tensors) is copied unchanged")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "nemotron_h"])
def test_other_verbs_carry_the_head(family, tmp_path):
    base, names = tmp_path / "base", names_of(family)
    _, head = with_head(family, base, names)
    convert_checkpoint(base, tmp_path / "converted")
    assert carries(tmp_path / "converted", head)
    assert f"not trained    {len(names)} tensors of the MTP head" in inspect_checkpoint(
        str(base)
    ).text().replace("  (", " (")


def test_the_size_of_what_does_not_train_is_in_gib(tiny_checkpoint):
    small = inspect_checkpoint(str(tiny_checkpoint("qwen3_moe")))
    large = replace(small, untrained={"a vision tower": (2, 7 * 2**28), "a head": (1, 2**30)})
    assert "not trained    2 tensors of a vision tower (1.75 GiB)" in large.text()
    assert "not trained    1 tensor of a head (1.00 GiB)" in large.text()


def test_a_value_head_is_called_by_its_name(tmp_path):
    with_head("qwen3_next", tmp_path, ["v_head.summary.weight"])
    with pytest.raises(CheckpointError, match=r"value head of TRL.*save the model alone"):
        open_checkpoint(tmp_path)


def test_a_text_config_over_files_with_vision(tmp_path):
    with_head("qwen3_5_moe_text", tmp_path, ["model.visual.blocks.0.attn.qkv.weight"])
    assert open_checkpoint(tmp_path).parts_left_out() == {OTHER: (1, 30)}


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        ("qwen3_moe", "mtp.fc.weight", "'mtp.fc.weight' in .* does not belong to this model"),
        ("qwen3_moe", "model.layers.3.eh_proj.weight", "num_hidden_layers is 3, .* 4 layers"),
        ("deepseek_v3", "model.layers.3.mlp.gate.weight", "num_hidden_layers is 3, .* 4 layers"),
        ("deepseek_v3", "model.layers.5.eh_proj.weight", "num_hidden_layers is 3, .* 6 layers"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight", "does not belong to this model"),
        ("qwen3_next", "model.mtp_fc.weight", "does not belong to this model"),
    ],
)
def test_what_nobody_declares_is_refused(family, name, says, tmp_path):
    with_head(family, tmp_path, [name])
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_head_in_fp8_blocks(family, tmp_path):
    """DeepSeek-V3's head is stored as the rest; its scales count, and nothing of it is loaded."""
    base, names = tmp_path / "base", names_of(family)
    with_head(family, base, names)
    floats = rewrite(base, as_fp8)
    opened = open_checkpoint(base, stored=True)
    assert opened.untrained.keys() == set(names)
    scales = [f"{name}_scale_inv" for name in names if packs(name)]
    stored = load_file(base / WEIGHTS)
    size = sum(stored[name].nbytes for name in (*names, *scales))
    assert len(scales) > 1
    assert opened.parts_left_out() == {MTP: (len(names) + len(scales), size)}
    state = load_model(base, dtype="float32").state_dict()
    router = opened.places.router_target
    (name,) = [n for n in state if n.endswith(f"layers.2.{router}")]
    assert torch.equal(state[name], floats[names_on_disk.name(family, "router", 2)])


def test_a_whole_model_names_what_it_is_saved_without(tmp_path):
    vision = [f"model.visual.blocks.{n}.norm.weight" for n in range(3)]
    with_head("qwen3_5_moe_text", tmp_path, [*vision, "mtp.fc.weight"])
    head, others = stale_head(open_checkpoint(tmp_path), carried=False)
    assert head.startswith("the MTP head (1 tensor) is not in merged/")
    assert others.startswith(f"3 tensors of {OTHER} are not in merged/")
