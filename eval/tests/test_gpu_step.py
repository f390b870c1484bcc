"""``eval/bench/gpu_step.py`` as far as a CPU goes: its figures, their form, and its arithmetic."""

import contextlib
import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_finetune.losses.presets import PRESETS

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def gpu_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_step")


def test_tiny_on_a_cpu(gpu_step, tmp_path, capsys):
    assert gpu_step.main(["--device", "cpu", "--tiny", "--write", str(tmp_path / "step.json")]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["schema"] == gpu_step.SCHEMA and result["environment"]
    shallow, deep = result["geometries"]["tiny"]["measured"]
    assert (shallow["layers"], deep["layers"], deep["tokens"]) == (2, 3, 64)
    for measured in (shallow, deep):
        assert tuple(measured["rows"]) == gpu_step.VARIANTS
        for row in measured["rows"].values():
            assert row["tokens_per_s"] == pytest.approx(64 / row["median_s"])
    # Weights in 4 bits are smaller, and a layer more is larger.
    weights = {name: row["weights_gb"] for name, row in deep["rows"].items()}
    assert weights[gpu_step.NF4] < weights["attention-only"] < weights["ours"]
    assert shallow["rows"]["ours"]["weights_gb"] < weights["ours"]
    tiny = result["geometries"]["tiny"]
    assert len(tiny["ratios"]) == 4 + len(gpu_step.PRESETS)
    assert "tokens/s" in capsys.readouterr().out


def test_stock_experts_run_as_named(gpu_step, monkeypatch):
    """The kernel that a stock variant is named for is the one that transformers calls."""
    calls = []
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def counted(*args, **kwargs):
        calls.append("grouped_mm")
        return grouped(*args, **kwargs)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", counted)
    arguments = Namespace(
        geometry="tiny", layers=2, tokens=16, length=8, rank=4, dtype="float32", device="cpu",
        train_router=True, gradient_checkpointing=False,
    )  # fmt: skip
    variants = gpu_step.variants_of(arguments, list(gpu_step.STOCK))
    batch = gpu_step.batch_of(arguments, 512)
    variants["stock-peft, eager"].step(batch)
    assert not calls
    variants["stock-peft, grouped_mm"].step(batch)
    assert len(calls) == 2  # one a layer


def test_presets_are_of_every_paper(gpu_step):
    sources = " ".join(PRESETS[name].source for name in gpu_step.PRESETS)
    assert all(paper in sources for paper in ("P0", "P1", "P2", "P3", "P4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "geometry", ["qwen3_30b_a3b", "gpt_oss_20b", "deepseek_v2_lite", "moonlight_16b_a3b"]
)
def test_a_dry_run_at_true_widths(gpu_step, geometry, monkeypatch):
    """Shapes, alignment of the grouped kernel and losses of the full mode, without values."""
    # No autocast for the meta device; transformers switches it off around its rope.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    arguments = Namespace(
        geometry=geometry, layers=None, tokens=4096, length=4096, rank=16, dtype="bfloat16",
        device="meta", train_router=True, gradient_checkpointing=False,
    )  # fmt: skip
    arguments.layers = gpu_step.depths(arguments, geometry)[0]
    # Stock experts read group sizes, and bitsandbytes reads values: those run with --tiny.
    names = ["ours", *(f"ours+{name}" for name in gpu_step.PRESETS)]
    variants = gpu_step.variants_of(arguments, names)
    batch = gpu_step.batch_of(arguments, gpu_step.config_of(arguments).vocab_size)
    del batch["attention_mask"]  # transformers asks whether it is all ones
    for variant in variants.values():
        variant.step(batch)


def test_a_layers_cost_and_the_whole_depth(gpu_step):
    rows = [
        {"layers": layers, "tokens": 100, "rows": {"ours": {
            "median_s": 0.5 + 0.25 * layers, "gb": 3.0 + 3.0 * layers,
        }}}
        for layers in (2, 5)
    ]  # fmt: skip
    found = gpu_step.per_layer(*rows, 20)["ours"]
    assert found["layer_s"] == pytest.approx(0.25) and found["layer_gb"] == pytest.approx(3.0)
    assert found["whole_depth_s"] == pytest.approx(5.5)
    assert found["whole_depth_gb"] == pytest.approx(63.0)
    assert found["whole_depth_tokens_per_s"] == pytest.approx(100 / 5.5)


def test_widths_are_those_of_the_checkpoints(gpu_step):
    """Parameters of the whole model, in billions."""
    from transformers import AutoModelForCausalLM

    published = {
        "qwen3_30b_a3b": 30.5, "gpt_oss_20b": 20.9, "deepseek_v2_lite": 15.7,
        "moonlight_16b_a3b": 16.0,
    }  # fmt: skip
    assert set(published) == set(gpu_step.WIDTHS)
    for geometry, billions in published.items():
        config = gpu_step.GEOMETRIES[geometry][0]()
        config.num_hidden_layers = gpu_step.DEPTH[geometry]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01), geometry
