"""Published layouts can be pruned: the plan from their headers is what the class needs."""

import pytest

from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.prune import plan_pruning
from moe_finetune.models.expert_groups import ExpertGroups
from tests.published import fixture, generate

CASES = {
    "deepseek_v3": ("n_routed_experts", True),  # blocks of FP8; a head with a bias of its own
    "ernie_4_5_21b_a3b": ("moe_num_experts", True),  # a bias with a dimension before the experts'
    "gemma_4_26b_a4b": ("num_experts", False),  # a factor for each expert, a vision part
    "gpt_oss_20b": ("num_local_experts", False),  # stacks in MXFP4
    "kimi_k2": ("n_routed_experts", False),  # packed 4-bit integers
    "mixtral_8x7b": ("num_local_experts", False),
    "qwen3_5_35b_a3b": ("num_experts", True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_has_a_quarter_fewer_experts(name, tmp_path):
    folder = generate.write(fixture.shortened(fixture.read(name)), tmp_path / "base")
    base = open_checkpoint(folder, stored=True)
    total = base.places.num_experts
    groups = ExpertGroups.of(base.family, base.model_config.get_text_config())
    size = total // groups.groups
    kept = [expert for expert in range(total) if expert % size >= size // 4]
    plan = plan_pruning(base, dict.fromkeys(base.places.moe_layers, kept), tmp_path / "pruned")
    key, head = CASES[name]
    assert f"config.json: {key} becomes {len(kept)}" in plan.notes
    assert any("left out" in note for note in plan.notes) == head
    experts = 1 - plan.size / base.size
    assert 0.1 < experts < 0.5  # a quarter of nearly all, and a head
    assert not (tmp_path / "pruned").exists()
