"""Measured strength equals a separate backward of each loss by hand."""

import json

import pytest
import torch

from moe_finetune import measure_strength
from moe_finetune.errors import ObjectiveError
from tests import tiny
from tests.training.cases import adapted
from tests.training.strength import BATCHES, agree, by_hand


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
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
    said = [r.getMessage() for r in caplog.records if r.name.endswith("training.strength")]
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


def test_inspect_measures_what_the_run_then_logs_and_the_recipe_notes_the_weight(tmp_path):
    from typer.testing import CliRunner

    from moe_finetune.cli import app
    from moe_finetune.recipe.schema import load_recipe
    from moe_finetune.run import run_recipe

    checkpoint = tiny.save("qwen3_moe", tmp_path / "model", num_hidden_layers=2)
    lines = [{"text": f"{i} and {i * 7} are {i * 8}. " * (1 + i % 3)} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{path: {checkpoint}, dtype: float32}}
method:
  preset: orthogonal_variance
  terms: {{variance: {{share: 0.2}}}}
lora: {{rank: 4, alpha: 8.0, dropout: 0.0, targets: [attention, experts]}}
data: {{train: {tmp_path / "data.jsonl"}, max_length: 60, packing: true}}
trainer:
  max_steps: 2
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  logging_steps: 1
  report_to: none
  save_strategy: "no"
export: {{merge: false}}
"""
    )
    command = ["inspect", str(checkpoint), "--recipe", str(recipe), "--strength"]
    shown = CliRunner().invoke(app, [*command, "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)
    assert [row["term"] for row in rows] == ["load_balance", "orthogonality", "variance"]
    assert rows[2]["share_router"] == pytest.approx(0.2)
    output = run_recipe(load_recipe(recipe), tmp_path / "run")
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert not any(key.startswith("strength/") for key in logged[1])
    for row in rows:
        for key in ("weight", "share_router", "share_experts", "cosine_router"):
            got = logged[0][f"strength/{row['term']}/{key}"]
            assert got == pytest.approx(row[key], rel=1e-4, abs=1e-6), (row["term"], key)
    noted = (output / "recipe.yaml").read_text()
    weight = logged[0]["strength/variance/weight"]
    assert "share: 0.2" in noted and f"weight: {weight!r}" in noted
    assert load_recipe(output / "recipe.yaml").hash == load_recipe(recipe).hash
