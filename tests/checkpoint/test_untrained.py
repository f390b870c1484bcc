"""MTP heads as they are published: accepted, counted, carried byte for byte; strangers are not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint import merge_adapter, open_checkpoint, permute_experts
from moe_finetune.checkpoint.convert import convert_checkpoint
from moe_finetune.checkpoint.untrained import MTP, OTHER
from moe_finetune.errors import CheckpointError
from moe_finetune.models import FAMILIES
from moe_finetune.training.inspection import inspect_checkpoint
from tests import tiny
from tests import tiny_families as families
from tests.tiny_adapter import adapted

WEIGHTS = "model.safetensors"
# A layer after the decoder's last: DeepSeek-V3, GLM-4.5, Hunyuan 3 and their kin.
LATER_LAYER = (
    "{stack}{layers}.eh_proj.weight",
    "{stack}{layers}.enorm.weight",
    "{stack}{layers}.hnorm.weight",
    "{stack}{layers}.shared_head.norm.weight",
    "{stack}{layers}.shared_head.head.weight",
    "{stack}{layers}.embed_tokens.weight",
    "{stack}{layers}.mlp.gate.weight",
    "{stack}{layers}.mlp.experts.0.gate_proj.weight",
    "{stack}{layers}.mlp.experts.1.up_proj.weight",
)
QWEN = (
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "mtp.layers.0.mlp.gate.weight",
    "mtp.layers.0.mlp.experts.3.down_proj.weight",
    "mtp.layers.0.mlp.experts.gate_up_proj",
)
HEADS: dict[str, tuple[str, ...]] = {
    "deepseek_v32": LATER_LAYER,
    "deepseek_v4": (
        "mtp.0.e_proj.weight",
        "mtp.0.h_proj.weight",
        "mtp.0.attn.wq_a.weight",
        "mtp.0.ffn.gate.weight",
        "mtp.0.ffn.experts.2.w1.weight",
    ),
    "ernie4_5_moe": (
        "model.mtp_block.0.mlp.down_proj.weight",
        "model.mtp_emb_norm.0.weight",
        "model.mtp_hidden_norm.0.weight",
        "model.mtp_linear_proj.0.weight",
    ),
    "exaone_moe": ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate_proj.weight"),
    "glm4_moe": LATER_LAYER,
    "glm4_moe_lite": LATER_LAYER,
    "glm4v_moe": LATER_LAYER,
    "glm5_next": LATER_LAYER,
    "glm_moe_dsa": LATER_LAYER,
    "hy_v3": (*LATER_LAYER, "{stack}{layers}.mlp.router.gate.weight"),
    "hy_v4": ("model.mtp_layers.0.eh_proj.weight",),
    "inkling_mm_model": ("model.mtp.layers.0.input_proj.weight",),
    "mimo_v2_flash": ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.enorm.weight"),
    "minimax_m2": (
        *(name.replace(".mlp.", ".block_sparse_moe.") for name in LATER_LAYER),
        "mtp.layers.0.input_layernorm.weight",  # where config.json counts modules of the head
    ),
    "minimax_m3_vl": ("language_model.model.mtp.layers.0.eh_proj.weight",),
    "moonlight": LATER_LAYER,
    "nemotron_h": (
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.mixer.q_proj.weight",
        "mtp.layers.1.mixer.experts.3.up_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
    ),
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": QWEN,
    "qwen4_exp_text": QWEN,
}


def names_of(family: str) -> list[str]:
    stack = FAMILIES[family].disk.stack
    layers = tiny.config(family) if family in tiny.FAMILY_NAMES else families.config(family)
    count = layers.get_text_config().num_hidden_layers
    return [name.format(stack=stack, layers=count) for name in HEADS[family]]


def with_head(family, folder, names):
    """Write the family's tiny model with random tensors of these names."""
    changes = {"num_mtp_modules": 3} if family == "minimax_m2" else {}
    source = tiny if family in tiny.FAMILY_NAMES else families
    model = source.model(family, **changes)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(8)
    head = {
        name: torch.randn(3 + place, 5, generator=generator).to(torch.bfloat16)
        for place, name in enumerate(names)
    }
    save_file(load_file(folder / WEIGHTS) | head, folder / WEIGHTS, metadata={"format": "pt"})
    return model, head


def carries(folder, head):
    stored = load_file(folder / WEIGHTS)
    return all(torch.equal(stored[name], tensor) for name, tensor in head.items())


@pytest.mark.parametrize("family", HEADS)
def test_a_published_head_is_counted_and_carried(family, tmp_path):
    base, names = tmp_path / "base", names_of(family)
    model, head = with_head(family, base, names)
    opened = open_checkpoint(base)
    assert dict(opened.untrained) == dict.fromkeys(names, MTP)
    assert list(opened.experts) == FAMILIES[family].moe_layers(model.config)
    size = sum(tensor.nbytes for tensor in head.values())
    assert opened.parts_left_out() == {MTP: (len(names), size)}

    adapted(model, "lora").save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    report = merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert carries(tmp_path / "merged", head)
    (line,) = report.plan.notes
    assert line.startswith(f"the MTP head ({len(names)} tensors) stays as it is")


@pytest.mark.parametrize("family", ["moonlight", "qwen3_next", "nemotron_h"])
def test_other_verbs_carry_the_head(family, tmp_path):
    base, names = tmp_path / "base", names_of(family)
    _, head = with_head(family, base, names)
    layer, count = list(open_checkpoint(base).experts.items())[-1]
    order = [*range(1, count // 2), 0, *range(count // 2, count)]
    permute_experts(base, {layer: order}, tmp_path / "moved")
    convert_checkpoint(base, tmp_path / "converted")
    assert carries(tmp_path / "moved", head) and carries(tmp_path / "converted", head)
    assert f"not trained    {len(names)} tensors of the MTP head" in inspect_checkpoint(
        str(base)
    ).text().replace("  (", " (")


def test_a_layer_of_the_head_has_no_experts_to_reorder(tmp_path):
    with_head("moonlight", tmp_path / "base", names_of("moonlight"))
    with pytest.raises(CheckpointError, match=r"layer 3 of .* has no experts; layers with: 1-2"):
        permute_experts(tmp_path / "base", {3: [1, 0]}, tmp_path / "moved")


def test_a_text_config_over_files_with_vision(tmp_path):
    with_head("qwen3_5_moe_text", tmp_path, ["model.visual.blocks.0.attn.qkv.weight"])
    assert open_checkpoint(tmp_path).parts_left_out() == {OTHER: (1, 30)}


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        ("qwen3_moe", "mtp.fc.weight", "'mtp.fc.weight' in .* does not belong to this model"),
        ("qwen3_moe", "model.layers.3.eh_proj.weight", "num_hidden_layers is 3, .* 4 layers"),
        ("moonlight", "model.layers.3.mlp.gate.weight", "num_hidden_layers is 3, .* 4 layers"),
        ("moonlight", "model.layers.5.eh_proj.weight", "num_hidden_layers is 3, .* 6 layers"),
        ("moonlight", "model.layers.2.eh_proj.weight", "does not belong to this model"),
        ("qwen3_next", "model.mtp_fc.weight", "does not belong to this model"),
    ],
)
def test_what_nobody_declares_is_refused(family, name, says, tmp_path):
    with_head(family, tmp_path, [name])
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)
