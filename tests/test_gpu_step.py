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
from tests import tiny

BENCH = Path(__file__).resolve().parents[1] / "eval" / "bench"


@pytest.fixture
def gpu_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_step")


def test_tiny_on_a_cpu(gpu_step, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("roofline"), "product_tflops", lambda arguments: 0.05
    )  # seconds on a CPU
    assert gpu_step.main(["--device", "cpu", "--tiny", "--write", str(tmp_path / "step.json")]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["schema"] == gpu_step.SCHEMA and result["environment"]
    shallow, deep = result["geometries"]["tiny"]["measured"]
    assert (shallow["layers"], deep["layers"], deep["tokens"]) == (2, 3, 64)
    for measured in (shallow, deep):
        assert tuple(measured["rows"]) == gpu_step.VARIANTS
        for row in measured["rows"].values():
            assert row["tokens_per_s"] == pytest.approx(64 / row["median_s"])
        assert 0 < sum(kernel["share"] for kernel in measured["kernels"]) <= 1
    # Weights in 4 bits are smaller, and a layer more is larger.
    weights = {name: row["weights_gb"] for name, row in deep["rows"].items()}
    assert weights[gpu_step.NF4] < weights["attention-only"] < weights["ours"]
    assert shallow["rows"]["ours"]["weights_gb"] < weights["ours"]
    tiny = result["geometries"]["tiny"]
    assert len(tiny["ratios"]) == 4 + len(gpu_step.PRESETS)
    assert set(tiny["peers"]) == set(gpu_step.PEERS)
    assert all("need a GPU" in peer["outcome"] for peer in tiny["peers"].values())
    assert "tokens/s" in capsys.readouterr().out


def test_a_peer_runs_with_the_same_settings(gpu_step):
    settings = {
        "tokens": 96, "length": 48, "rank": 5, "dtype": "float32", "device": "cpu", "rounds": 7,
        "warmup": 1,
    }  # fmt: skip
    for checkpointing in (False, True):
        arguments = Namespace(**settings, gradient_checkpointing=checkpointing)
        command = importlib.import_module("peers").peer_command(
            arguments, "a peer", Path("rows.json"), "tiny", 3
        )
        assert ("--gradient-checkpointing" in command) is checkpointing
        for name, value in (*settings.items(), ("geometry", "tiny"), ("layers", 3)):
            assert command[command.index(f"--{name}") + 1] == str(value)


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
    variants = gpu_step.models_of(arguments, list(gpu_step.STOCK))
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
    variants = gpu_step.models_of(arguments, names)
    batch = gpu_step.batch_of(arguments, gpu_step.config_of(arguments).vocab_size)
    del batch["attention_mask"]  # transformers asks whether it is all ones
    for timed in variants.values():
        timed.step(batch)
    roofline = importlib.import_module("roofline")
    assert roofline.step_bytes(arguments, variants["ours"].model) > 1e9
    assert roofline.step_flops(arguments, True) > 1e12


def test_a_peers_grouped_gemm_gets_the_rows_that_it_sorts(gpu_step):
    """The experts function around it, with products in plain torch, has transformers' values."""
    peers = importlib.import_module("peers")

    def grouped_gemm(x, w, m_sizes, topk, gather_indices, autotune, permute_x=False,
                     permute_y=False, is_first_gemm=True):  # fmt: skip
        order = gather_indices.long()
        rows = x[order // topk] if permute_x else x
        products = [r @ m.T for r, m in zip(rows.split(m_sizes.tolist()), w, strict=True)]
        out = torch.cat(products)
        return torch.empty_like(out).index_copy(0, order, out) if permute_y else out

    model = tiny.model("qwen3_moe")
    batch = tiny.batch(rows=2, length=9)
    with torch.no_grad():
        expected = model(**batch).logits
        ALL_EXPERTS_FUNCTIONS.register("tried", peers.with_grouped_gemm(grouped_gemm))
        model.config._experts_implementation = "tried"
        logits = model(**batch).logits
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_peer_that_fails_says_why(gpu_step, monkeypatch):
    """In its own process: here the package is missing, or has no GPU."""
    monkeypatch.setattr(importlib.import_module("peers"), "left_out", lambda name, device: None)
    arguments = Namespace(
        peers=list(gpu_step.PEERS)[:1], tokens=16, length=8, rank=4, dtype="float32", device="cpu",
        rounds=1, warmup=0, gradient_checkpointing=False,
    )  # fmt: skip
    (row,) = gpu_step.peer_rows(arguments, "tiny", 2).values()
    assert row["outcome"].startswith("left out: ModuleNotFoundError: No module named 'axolotl'")


def test_a_layers_cost_and_the_whole_depth(gpu_step):
    rows = [
        {"layers": layers, "tokens": 100, "rows": {"ours": {
            "median_s": 0.5 + 0.25 * layers, "weights_gb": 3.0 + layers, "step_gb": 2.0 * layers,
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
