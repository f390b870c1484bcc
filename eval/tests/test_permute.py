"""Reordered experts: the same function, other numbers, and a way back."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from eval.placement.permute import check, permute_experts
from moe_finetune.errors import CheckpointError
from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import class_of
from moe_finetune.moe.layers import moe_layers
from tests.checkpoint import helpers
from tests.families.cases import EACH_KIND, batch
from tests.support import names_on_disk, tiny, tiny_families

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


@pytest.mark.parametrize(
    "family",
    [name for name in EACH_KIND if "gate_up" in names_on_disk.patterns(name)]
    + ["deepseek_v4", "jamba", "nemotron_h"],
)
def test_permuted_experts_compute_the_same(family, tmp_path):
    stock = tiny_families.model(family)
    stock.save_pretrained(tmp_path / "base")
    # Every tiny config.json has n_group 2, whose groups stay together.
    order = [8, 5, 9, 6, 7, 3, 0, 4, 1, 2]
    layer = FAMILIES[family].places(stock.config).moe_layers[1]  # the first may look experts up
    permute_experts(tmp_path / "base", {layer: order}, tmp_path / "moved")
    moved = class_of(stock.config).from_pretrained(tmp_path / "moved").eval()
    with torch.no_grad():
        wanted, found = stock(**batch()).logits, moved(**batch()).logits
    assert torch.allclose(wanted, found, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    before, after = (moe_layers(model)[1].experts.down_proj for model in (stock, moved))
    assert torch.equal(before[order], after)


def test_groups_of_experts_are_the_family_s():
    """n_group of a config counts where the router has groups."""
    order = [8, 0, *range(1, 8), 9]
    for family in ("laguna", "dots1"):
        layer = moe_layers(tiny_families.model(family))[1]
        assert layer.experts.config.n_group == 2
        refused = pytest.raises(CheckpointError, match="mixes the 2 routing groups")
        with refused if family == "dots1" else nullcontext():
            check(layer, order)
