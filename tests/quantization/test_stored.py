"""Checkpoints that come quantized are read as the floats that the libraries read them as."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.cli import main
from moe_finetune.quantization.weight import QuantizedWeight, quantized
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.run import run_recipe
from tests.quantization.formats import as_fp8, as_int4, as_mxfp4, rewrite
from tests.quantization.models import batch, save
from tests.support import tiny


def compare(folder, other, floats, caplog):
    """Loaded as it is and as nf4, ``folder`` is the unquantized checkpoint of ``floats``."""
    save_file(floats, other / "model.safetensors", metadata={"format": "pt"})
    wanted = load_model(other, dtype="float32")
    with caplog.at_level(logging.WARNING):
        found = load_model(folder, dtype="float32")
    assert sum("and is dequantized while it loads" in line for line in caplog.messages) == 1
    held = load_model(folder, dtype="float32", quantization="nf4")
    state, packed = found.state_dict(), held.state_dict()
    for name, value in wanted.state_dict().items():
        assert torch.equal(state[name], value), name
        if quantized(packed[name]):
            again = QuantizedWeight.of(value).dequantize()
            assert torch.equal(packed[name].dequantize(), again), name
    with torch.no_grad():
        inputs = batch()["input_ids"]
        assert torch.equal(found(inputs).logits, wanted(inputs).logits)


@pytest.mark.parametrize("make", [as_fp8, as_int4])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fp8_and_int4(make, family, tmp_path, caplog):
    folder, other = save(family, tmp_path / "stored"), save(family, tmp_path / "floats")
    compare(folder, other, rewrite(folder, make), caplog)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path, caplog):
    from tests.support import tiny_families

    for name in ("stored", "floats"):
        tiny_families.model("gpt_oss", intermediate_size=64).save_pretrained(tmp_path / name)
    floats = rewrite(tmp_path / "stored", as_mxfp4)
    compare(tmp_path / "stored", tmp_path / "floats", floats, caplog)


def test_training_on_one_leaves_an_adapter_for_the_unquantised_base(tmp_path, capsys):
    base = tiny.save("qwen3_moe", tmp_path / "base")
    stored = tiny.save("qwen3_moe", tmp_path / "stored")
    rewrite(stored, as_fp8)
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "one and two"}\n{"text": "three and four"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {stored}, dtype: float32, quantization: nf4}}\n"
        f"lora: {{rank: 4}}\ndata: {{train: {data}, max_length: 16}}\n"
        "trainer: {max_steps: 1, learning_rate: 1.0e-3, report_to: none}\n"
    )
    run = run_recipe(load_recipe(recipe), tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["verify"]["tensors"] and open_checkpoint(run / "merged").quantized is None
    command = ["merge", str(run), "--output", str(tmp_path / "merged")]
    other = tiny.save("qwen3_moe", tmp_path / "other")
    rewrite(other, lambda tensors: as_fp8({n: t * 1.5 for n, t in tensors.items()}))
    assert main([*command[:2], "--base", str(other), "--output", "no"]) == 2
    assert "was trained on another base" in capsys.readouterr().err
    assert main([*command, "--base", str(base), "--verify"]) == 0
    assert "changed tensors are base + adapter, rounded once" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "merged").quantized is None
