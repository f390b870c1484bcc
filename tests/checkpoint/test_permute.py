"""Reordered experts: the same function, other numbers, and a way back to the same bytes."""

import pytest
import torch
from safetensors.torch import load_file

from moe_finetune.checkpoint import inverse, open_checkpoint, permute_experts
from moe_finetune.errors import CheckpointError
from tests import tiny
from tests.checkpoint import helpers

PLAN = {
    1: [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6],
    2: [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 0, 1],
}


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_same_logits_and_round_trip(family, tmp_path):
    base, there, back = (tmp_path / name / family for name in ("base", "there", "back"))
    tiny.model(family).save_pretrained(base, max_shard_size="900KB")
    tiny.tokenizer().save_pretrained(base)
    report = permute_experts(base, PLAN, there)
    wanted, found = (helpers.logits(helpers.load(folder)) for folder in (base, there))
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    assert (report.layers, report.bytes_written) == (
        (1, 2),
        sum(map(len, contents(there).values())),
    )

    disk, old, new = open_checkpoint(base).family.disk, tensors(base), tensors(there)
    for layer, order in PLAN.items():
        assert torch.equal(new[disk.name("router", layer)], old[disk.name("router", layer)][order])
        for expert, source in enumerate(order):
            for part in ("gate", "up", "down"):
                name = disk.name(part, layer, expert)
                assert torch.equal(new[name], old[disk.name(part, layer, source)])
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert all(f"layers.{layer}." not in name for name in moved for layer in (0,))
    parts = 1 + (disk.router_bias is not None)
    fixed = sum(expert == old for order in PLAN.values() for expert, old in enumerate(order))
    assert len(moved) == 2 * (36 + parts) - 3 * fixed

    card = (there / "README.md").read_text()
    assert f"`{family}` with its experts reordered" in card and str(tmp_path) not in card
    permute_experts(there, inverse(PLAN), back)
    (back / "README.md").unlink()
    assert contents(back) == contents(base)


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
def test_wrong_plan(bases, tmp_path, plan, part):
    """DeepSeek's layer 0 is dense."""
    with pytest.raises(CheckpointError, match=part):
        permute_experts(bases("deepseek_v2"), plan, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_groups_stay_together(bases, tmp_path):
    base = tmp_path / "base" / "deepseek_v3"
    tiny.model("deepseek_v3", n_group=4, topk_group=2).save_pretrained(base)
    whole = {1: [6, 8, 7, 2, 1, 0, 11, 10, 9, 3, 4, 5]}
    permute_experts(base, whole, tmp_path / "deepseek_v3")
    wanted, found = (
        helpers.logits(helpers.load(folder)) for folder in (base, tmp_path / "deepseek_v3")
    )
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    with pytest.raises(CheckpointError, match="4 routing groups"):
        permute_experts(base, PLAN, tmp_path / "m")
