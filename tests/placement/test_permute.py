"""Reordered experts: the same function, other numbers, and a way back."""

import pytest
import torch
from safetensors.torch import load_file

from eval.placement.permute import permute_experts
from moe_finetune.errors import CheckpointError
from tests import tiny
from tests.checkpoint import helpers

PLAN = {
    1: [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6],
    2: [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 0, 1],
}
BACK = {layer: sorted(range(12), key=order.__getitem__) for layer, order in PLAN.items()}


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_same_logits_and_round_trip(family, tmp_path):
    base, there, back = (tmp_path / name for name in ("base", "there", "back"))
    tiny.model(family).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    permute_experts(base, PLAN, there)
    wanted, found = (helpers.logits(helpers.load(folder)) for folder in (base, there))
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    old, new = tensors(base), tensors(there)
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert len(moved) > 2 * 3 * 10 and not any("layers.0." in name for name in moved)
    permute_experts(there, BACK, back)
    assert all(torch.equal(old[name], tensor) for name, tensor in tensors(back).items())


def tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ({7: list(range(12))}, "layer 7"),
        ({0: list(range(12))}, "layer 0"),
        ({1: list(range(11))}, "0-11 once"),
        ({1: [0, 0, *range(2, 12)]}, "11 different"),
        ({1: list(range(1, 13))}, "0-11 once"),
    ],
)
def test_wrong_plan(tiny_checkpoint, tmp_path, plan, part):
    """DeepSeek's layer 0 is dense."""
    with pytest.raises(CheckpointError, match=part):
        permute_experts(tiny_checkpoint("deepseek_v2"), plan, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_groups_stay_together(tmp_path):
    base = tmp_path / "base" / "deepseek_v3"
    tiny.model("deepseek_v3", n_group=4, topk_group=2).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    whole = {1: [6, 8, 7, 2, 1, 0, 11, 10, 9, 3, 4, 5]}
    permute_experts(base, whole, tmp_path / "deepseek_v3")
    wanted, found = (
        helpers.logits(helpers.load(folder)) for folder in (base, tmp_path / "deepseek_v3")
    )
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    with pytest.raises(CheckpointError, match="4 routing groups"):
        permute_experts(base, PLAN, tmp_path / "m")
