"""Loading a checkpoint quantized: every family, tensor by tensor, exactly what it holds."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import core_model_loading

from moe_finetune import load_model
from moe_finetune.errors import CheckpointError, DependencyError, RecipeError
from moe_finetune.models import FAMILIES as FACTS
from moe_finetune.quantization import codec
from moe_finetune.quantization.weight import QuantizedWeight, quantized, resident_bytes
from tests.quantization.models import FAMILIES, batch, save

# transformers keeps its norms in float32, which its bfloat16 layers do not take as they are.
NEEDS_AUTOCAST = {"deepseek_v4"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_its_checkpoint_quantised(family, tmp_path):
    """Each weight is the stored one, quantized or as it is; the stock forward runs on it."""
    save(family, tmp_path, torch.bfloat16)
    stock = load_model(tmp_path, dtype="bfloat16")
    model = load_model(tmp_path, dtype="bfloat16", quantization="nf4")
    wanted, found = stock.state_dict(), model.state_dict()
    assert list(wanted) == list(found)
    held = {name for name, value in found.items() if quantized(value)}
    for name, value in wanted.items():
        if name in held:
            value = QuantizedWeight.of(value).dequantize()
            assert torch.equal(found[name].dequantize(), value), name
            wanted[name].copy_(value)
        else:
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    buffers = dict(model.named_buffers())
    for name, buffer in stock.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    facts = FACTS[family].places(stock.config)
    router = f".{facts.router_path}."
    assert not any(router in name or "norm" in name or "embed" in name for name in held)
    assert "lm_head.weight" not in held
    # All experts, and the layers that attention and shared experts have.
    layers = len(facts.moe_layers)
    assert sum(name.endswith(facts.expert_parameters) for name in held) >= 2 * layers
    assert any(t in name for name in held for t in facts.attention)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=family in NEEDS_AUTOCAST)
    with torch.no_grad(), autocast:
        inputs = batch()["input_ids"]
        found, wanted = model(inputs).logits, stock(inputs).logits
        if not torch.equal(found, wanted):
            # Kernels may round a product of bfloat16 otherwise where its input is strided (Mamba):
            # far below the dtype's own error, and below one stack whose experts are exchanged.
            rounding = wanted - stock.float()(inputs).logits
            assert (found - wanted).float().norm() < 0.2 * rounding.norm()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_one_parameter_is_read_at_a_time(family, tmp_path, monkeypatch):
    """Tensors are read when their parameter is quantized, whether files hold matrices or stacks."""
    save(family, tmp_path)
    read, largest, original = [0], [0], core_model_loading._materialize_copy

    def reading(*args):
        values = original(*args)
        read[0] += values.numel()
        return values

    def quantizing(weight):
        largest[0] = max(largest[0], read[0])
        read[0] = 0
        return quantized_of(weight)

    quantized_of = QuantizedWeight.of
    monkeypatch.setattr(core_model_loading, "_materialize_copy", reading)
    monkeypatch.setattr(QuantizedWeight, "of", quantizing)
    model = load_model(tmp_path, dtype="float32", quantization="nf4")
    stack = max(p.numel() for p in model.parameters() if p.dim() == 3)
    others = sum(p.numel() for p in model.parameters() if not quantized(p))
    assert largest[0] <= stack + others


def test_bytes_are_four_bits_and_a_scale(tmp_path):
    save("qwen3_moe", tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", quantization="nf4")
    packed = [p for p in model.parameters() if quantized(p)]
    weights = sum(p.numel() for p in packed)
    stored = sum(p.stored_bytes for p in packed)
    assert 4.5 / 8 <= stored / weights <= 1.05 * 4.5 / 8
    others = sum(p.numel() * p.element_size() for p in model.parameters() if not quantized(p))
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert resident_bytes(model) == stored + others + buffers


def test_what_cannot_be_loaded_so_is_said(tmp_path, monkeypatch):
    save("qwen3_moe", tmp_path)
    with pytest.raises(RecipeError, match="unknown format 'nf5'; did you mean 'nf4'"):
        load_model(tmp_path, quantization="nf5")
    with pytest.raises(RecipeError, match="unknown format 'int8'"):
        load_model(tmp_path, quantization="int8")
    with pytest.raises(RecipeError, match="spreads the model"):
        load_model(tmp_path, quantization="nf4", device_map={"a": "cpu", "b": "meta"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) * 1e7 for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts.* has values that overflow .*model.dtype"):
        load_model(tmp_path, dtype="float16", quantization="nf4")
    codec.bitsandbytes.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(DependencyError, match="pip install bitsandbytes"):
        load_model(tmp_path, quantization="nf4")
    codec.bitsandbytes.cache_clear()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load_model(tmp_path)
