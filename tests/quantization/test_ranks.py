"""Quantized weights shared by two ranks, by FSDP2 or with experts spread over them, train as in one
process.
"""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import tiny
from tests.quantization.ranks_worker import CASES, WORLD
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
LIMIT = {"sharded": 1e-6, "spread": 3e-5}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "measured.json"
    run_ranks("tests.quantization.ranks_worker", WORLD, out)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("case", "mode"), [(case, mode) for case, row in CASES.items() for mode in row[3]]
)
def test_two_ranks_train_as_one_process(measured, case, mode):
    """Gradients of a second step, after an update; and each rank stores its part of the bytes."""
    row = measured[case][mode]
    assert "error" not in row, row["error"]
    assert measured[case]["tensors"] > 20 and row["gradients"] <= LIMIT[mode]
    assert row["loss"][1] == pytest.approx(row["loss"][0], rel=1e-6)
    # Experts are shared out; in mode "spread" all else is on every rank, of 7 experts one has 4.
    assert 0.49 < row["bytes"] < {"sharded": 0.56, "spread": 0.7}[mode]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A recipe's run in one process, by FSDP2 and with experts spread over two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    base = tiny.save("qwen3_moe", folder / "base", num_hidden_layers=2)
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"text": "row {n} says {n * n}"}}\n' for n in range(24)))
    terms = {"erc": {"weight": 0.3}, "load_balance": {"weight": 0.3, "scope": "global_batch"}}
    recipe = {
        "model": {"path": str(base), "dtype": "float32", "quantization": "nf4"},
        "method": {"terms": terms},
        "lora": {"rank": 4, "alpha": 8.0},
        "data": {"train": str(data), "max_length": 24, "packing": False},
        # With 1e-8 Adam turns the rounding of a gradient near zero into a whole step.
        "trainer": {"max_steps": 2, "save_steps": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-5,
                    "report_to": "none"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for mode, world in (("alone", 1), ("sharded", WORLD), ("spread", WORLD)):
        run_ranks("tests.quantization.runs_worker", world, folder, mode)
    return folder


@pytest.mark.parametrize("mode", ["sharded", "spread"])
@pytest.mark.parametrize("file", ["adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_a_run_on_two_ranks_saves_what_one_process_saves(runs, mode, file):
    one, two = (load_file(runs / run / file) for run in ("alone", mode))
    base = load_file(runs / "base" / "model.safetensors")
    assert one.keys() == two.keys()
    if file.startswith("merged"):
        assert any(not torch.equal(tensor, base[name]) for name, tensor in one.items())
    for name, tensor in one.items():
        # Adam divides rounding by small gradients; the gradients themselves are compared above.
        scale = tensor.abs().max().clamp_min(1e-3)  # a step of the learning rate
        assert float((two[name] - tensor).abs().max() / scale) < 1e-3, name
