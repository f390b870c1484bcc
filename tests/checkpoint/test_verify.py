"""Verification accepts what was merged and sees every kind of damage."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint import merge_adapter, open_checkpoint
from moe_finetune.checkpoint.adapter import open_adapter
from moe_finetune.checkpoint.reference import compare_logits
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import CheckpointError, NumericsError
from tests import tiny
from tests.checkpoint import helpers
from tests.checkpoint.helpers import select


def damage(folder, name, amount=0.05):
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] += amount
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("mode", ["logits", "tensors"])
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_accepts_a_merge(bases, adapters, family, mode, tmp_path):
    base, adapter = bases(family), adapters(family)
    merged = merge_adapter(base, adapter, tmp_path / family).output
    report = verify_merge(base, adapter, merged, mode=mode)
    assert report.mode == mode and report.max_rel < 1e-5
    assert report.checksums and "model.embed_tokens.weight" in report.checksums
    if mode == "tensors":
        kinds = {"up_proj", "down_proj", "o_proj", "q_proj"} - (
            {"up_proj", "down_proj"} if family == "mixtral" else set()
        )
        assert all(any(kind in name for name in report.compared) for kind in kinds)


@pytest.mark.parametrize("mode", ["logits", "tensors"])
def test_sees_a_wrong_merge(bases, adapters, mode, tmp_path):
    """The merge of another adapter."""
    base = bases("deepseek_v2")
    other = helpers.adapter(base, tmp_path / "other", seed=9)
    merged = merge_adapter(base, other, tmp_path / "deepseek_v2").output
    with pytest.raises(NumericsError, match="tolerance"):
        verify_merge(base, adapters("deepseek_v2"), merged, mode=mode)


@pytest.mark.parametrize("mode", ["logits", "tensors"])
def test_sees_an_untouched_tensor_change(bases, adapters, mode, tmp_path):
    base = bases("deepseek_v2")
    merged = merge_adapter(base, adapters("deepseek_v2"), tmp_path / "m").output
    damage(merged, "model.layers.0.mlp.up_proj.weight", 1e-4)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        verify_merge(base, adapters("deepseek_v2"), merged, mode=mode)


@pytest.mark.parametrize("mode", ["logits", "tensors"])
def test_chosen_experts_and_weights(bases, adapters, mode, tmp_path):
    base, full = bases("qwen3_moe"), adapters("qwen3_moe")
    small = select(full, base, {1: [9, 2, 5], 2: list(range(11))}, tmp_path / "small")
    pairs = [(full, 0.5), (small, -0.7)] if mode == "tensors" else [(small, -0.7)]
    merged = merge_adapter(base, pairs, tmp_path / "m").output
    assert verify_merge(base, pairs, merged, mode=mode).max_rel < 1e-5
    with pytest.raises(NumericsError):
        verify_merge(base, [(folder, 1.0) for folder, _ in pairs], merged, mode=mode)


@pytest.mark.parametrize("mode", ["logits", "tensors"])
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_full_router(bases, family, mode, tmp_path):
    base = bases(family)
    full = helpers.adapter(
        base, tmp_path / "a", target_parameters=None, modules_to_save=["gate"], seed=5
    )
    merged = merge_adapter(base, full, tmp_path / family).output
    report = verify_merge(base, full, merged, mode=mode, samples=40)
    assert report.max_rel < 1e-5
    router = open_checkpoint(base).family.disk.name("router", 1)
    assert mode == "logits" or router in report.compared
    damage(merged, router)
    with pytest.raises(NumericsError):
        verify_merge(base, full, merged, mode=mode, samples=40)


def test_several_adapters_by_logits(bases, adapters, tmp_path):
    base = bases("olmoe")
    other = helpers.adapter(base, tmp_path / "other", seed=9)
    pairs = [(adapters("olmoe"), 0.5), (other, 0.25)]
    merged = merge_adapter(base, pairs, tmp_path / "m").output
    assert verify_merge(base, pairs, merged, mode="logits").max_rel < 1e-5


def test_bias_prompts_and_half_precision(bases, adapters, tmp_path):
    base, bias = bases("deepseek_v3"), {1: [0.03 * i for i in range(12)]}
    merged = merge_adapter(
        base, adapters("deepseek_v3"), tmp_path / "deepseek_v3", bias=bias
    ).output
    prompts = ["One", "two words"]
    report = verify_merge(base, adapters("deepseek_v3"), merged, prompts, bias=bias)
    assert (report.mode, report.compared) == ("logits", 2) and report.max_rel < 1e-5
    half = merge_adapter(base, adapters("deepseek_v3"), tmp_path / "h" / "deepseek_v3", "bfloat16")
    for mode in ("logits", "tensors"):
        rounded = verify_merge(base, adapters("deepseek_v3"), half.output, mode=mode)
        assert 1e-5 < rounded.max_rel < rounded.tolerance


def test_a_model_whose_logits_are_all_zero(bases, adapters, tmp_path):
    """The relative error has nothing to refer to; equal is equal all the same."""
    base = shutil.copytree(bases("qwen3_moe"), tmp_path / "qwen3_moe")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    adapter = helpers.adapter(base, tmp_path / "adapter")
    merged = merge_adapter(base, adapter, tmp_path / "m").output
    report = verify_merge(base, adapter, merged, mode="logits")
    assert (report.max_abs, report.max_rel) == (0.0, 0.0)
    tensors = load_file(merged / "model.safetensors")
    tensors["lm_head.weight"][5, 2] = 0.5
    wrong = shutil.copytree(merged, tmp_path / "wrong")
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    parts = open_checkpoint(base), [(open_adapter(adapter), 1.0)], open_checkpoint(wrong)
    max_abs, relative = compare_logits(*parts, [torch.tensor([[3, 1, 4]])])
    assert max_abs > 0 and relative == math.inf
