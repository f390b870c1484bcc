"""Measured strength equals a separate backward of each loss by hand."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from moe_finetune import measure_strength
from moe_finetune.errors import ObjectiveError
from tests.support import tiny
from tests.training.cases import adapted
from tests.training.strength import shares
from tests.training.strength.strength import BATCHES, agree, by_hand


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_moe", "deepseek_v3"])
def test_measured_strength_is_a_separate_backward_of_each_loss(family, terms):
    model = adapted(family).eval()
    names = {name for name, _ in model.named_parameters()}
    before = torch.get_rng_state()
    rows = measure_strength(model, {"terms": terms}, BATCHES)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert names == {name for name, _ in model.named_parameters()}
    agree(rows, by_hand(model, terms, BATCHES))
    for row in rows:
        mainly = {"router": row["share_router"], "experts": row["share_experts"]}
        assert max(mainly.values()) > 0
        assert row["weight"] == terms[row["term"]]["weight"]


@pytest.mark.filterwarnings("ignore:.*alpha")
def test_a_share_that_no_weight_gives_is_refused():
    terms = {"erc": {"share": 0.1, "alpha": 1e6}}
    with pytest.raises(ObjectiveError, match=r"erc\.share: no weight gives it a share of 0\.1"):
        measure_strength(adapted(), {"terms": terms}, BATCHES)
    rows = measure_strength(adapted(), {"terms": {"erc": {"weight": 1.0, "alpha": 1e6}}}, BATCHES)
    assert rows[0]["share_router"] == 0 and rows[0]["weight_for_10_percent"] is None


def test_whispers_and_drowning_are_said(caplog):
    terms = {"variance": {"weight": 1e-5}, "z_loss": {"weight": 9.0}, "dpp": {"share": 0.3}}
    rows = measure_strength(adapted(), {"terms": terms}, BATCHES)
    said = [r.getMessage() for r in caplog.records if r.name.endswith("measures.loss_shares")]
    whisper, drowned = (r for r in said if "dpp" not in r)
    assert "variance: at weight 1e-05" in whisper and "too little to show" in whisper
    assert f"weight {rows[0]['weight_for_10_percent']:.3g} would be 10 %" in whisper
    assert "z_loss: at weight 9" in drowned and "drowns it" in drowned
    assert len([r for r in caplog.records if r.levelname == "WARNING" and "dpp" in r.msg]) == 0


def test_window_without_labels_is_refused():
    batch = {k: v for k, v in BATCHES[0].items() if k != "labels"}
    for window in ([], [batch]):
        with pytest.raises(ObjectiveError, match="at least one batch, each with labels"):
            measure_strength(adapted(), "erc", window)


def test_a_frozen_router_is_not_named_and_no_larger_weight_is_advised(caplog):
    terms = {"variance": {"share": 0.1}, "load_balance": {"weight": 1e-6}, "erc": {"weight": 1e-6}}
    with caplog.at_level("INFO", "moe_finetune"):
        measure_strength(adapted(router="frozen"), {"terms": terms}, BATCHES)
    said = {r.getMessage().split(":")[0].rpartition(".")[2]: r.getMessage() for r in caplog.records}
    for name in ("variance", "load_balance"):
        assert "acts on the router, frozen here" in said[name], said[name]
        assert "through the experts of earlier layers" in said[name]
        assert "would be 10 %" not in said[name]
    assert "on experts, too little to show: weight" in said["erc"]  # it trains experts, too


def test_a_share_without_adapted_experts_names_the_targets_to_add():
    """The cure that it named, a weight, was not what one wants."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny.model("qwen3_moe"), lora)
    with pytest.raises(ObjectiveError) as caught:
        measure_strength(model, {"terms": {"variance": {"share": 0.1}}}, BATCHES)
    targets = "['mlp.experts.gate_up_proj', 'mlp.experts.down_proj', 'mlp.gate.weight']"
    assert f"LoraConfig(target_parameters={targets})" in str(caught.value)


@pytest.mark.parametrize("family", shares.FAMILIES)
def test_a_share_gives_the_weight_that_it_gave(family):
    """Four windows, three of the losses measured again; the first line of a run rests on it."""
    expected = json.loads(shares.FILE.read_text())[family]
    for name, found in shares.weights(family).items():
        # Another processor's kernels round float32 differently: 4e-6 between two of them.
        assert found == pytest.approx(expected[name], rel=2e-5), name
