"""Quantized weights shared by two ranks, by FSDP2 or with experts spread over them, train as in one
process.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.quantization.ranks_worker import ALONE, CASES, WORLD, run_name
from tests.support import tiny
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow
LIMIT = {"sharded": 1e-6, "spread": 3e-5}


@pytest.fixture(scope="module")
def folder(warm, tmp_path_factory):
    """Steps by two ranks; and a recipe's run alone, by FSDP2 and with experts spread over two."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny.save("qwen3_moe", folder / "base", num_hidden_layers=2)
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"text": "row {n} says {n * n}"}}\n' for n in range(24)))
    run_ranks("tests.quantization.ranks_worker", WORLD, folder)
    return folder


@pytest.fixture(scope="module")
def measured(folder):
    return json.loads((folder / "measured.json").read_text())


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


@pytest.mark.parametrize("shared", [False, True], ids=["each expert's factors", "outer of all"])
@pytest.mark.parametrize("mode", ["sharded", "spread"])
@pytest.mark.parametrize("file", ["adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_a_run_on_two_ranks_saves_what_one_process_saves(folder, mode, file, shared):
    """As far apart as the gradients, to which SGD's steps are proportional."""
    one, two = (load_file(folder / run_name(run, shared) / file) for run in (ALONE, mode))
    base = load_file(folder / "base" / "model.safetensors")
    assert one.keys() == two.keys()
    if file.startswith("merged"):
        assert any(not torch.equal(tensor, base[name]) for name, tensor in one.items())
    for name, tensor in one.items():
        apart = float((two[name] - tensor).abs().max() / tensor.abs().max())
        assert apart <= LIMIT["spread"], (name, apart)
