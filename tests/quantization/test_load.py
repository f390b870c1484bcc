"""Loading a checkpoint quantized: every family, tensor by tensor, exactly what it holds."""

import pytest
import torch

from moe_finetune import load_model
from moe_finetune.checkpoint.load_quantized import PlainTensors, load_streaming
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.errors import CheckpointError, DependencyError, RecipeError
from moe_finetune.models import FAMILIES as FACTS
from moe_finetune.models.loading import load_config
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
            value = QuantizedWeight.of(value, "nf4").dequantize()
            assert torch.equal(found[name].dequantize(), value), name
            wanted[name].copy_(value)
        else:
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    buffers = dict(model.named_buffers())
    for name, buffer in stock.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    facts = FACTS[family]
    router = f".{facts.router_path}."
    assert not any(router in name or "norm" in name or "embed" in name for name in held)
    assert "lm_head.weight" not in held
    # All experts, and the layers that attention and shared experts have.
    layers = len(facts.moe_layers(stock.config))
    assert sum(name.endswith(facts.expert_parameters) for name in held) >= 2 * layers
    assert any(t in name for name in held for t in facts.attention_targets)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=family in NEEDS_AUTOCAST)
    with torch.no_grad(), autocast:
        inputs = batch()["input_ids"]
        assert torch.equal(model(inputs).logits, stock(inputs).logits)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "hunyuan_v1_moe"])
def test_streamed_without_a_format_is_what_transformers_loads(family, tmp_path):
    save(family, tmp_path, torch.bfloat16)
    stored = PlainTensors(open_checkpoint(tmp_path).tensors)
    config = load_config(tmp_path)
    model = load_streaming(tmp_path, config, stored, None, torch.bfloat16)
    wanted, found = load_model(tmp_path, dtype="bfloat16").state_dict(), model.state_dict()
    assert list(wanted) == list(found)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


class Counted(PlainTensors):
    """Notes the largest piece that is read."""

    largest = 0

    def _note(self, piece):
        self.largest = max(self.largest, piece.numel())
        return piece

    def read(self, name):
        return self._note(super().read(name))

    def read_expert(self, name, expert):
        return self._note(super().read_expert(name, expert))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_one_expert_is_read_at_a_time(family, tmp_path):
    """Whether the files hold matrices or stacks."""
    save(family, tmp_path)
    stored = Counted(open_checkpoint(tmp_path).tensors)
    model = load_streaming(tmp_path, load_config(tmp_path), stored, "nf4", torch.float32)
    stack = max(p.numel() for p in model.parameters() if p.dim() == 3)
    embedding = model.get_input_embeddings().weight.numel()
    assert stored.largest <= max(embedding, stack // 10)


def test_bytes_are_those_of_the_formats(tmp_path):
    save("qwen3_moe", tmp_path)
    for kind, bits in (("nf4", 4.5), ("int8", 8.0)):
        model = load_model(tmp_path, dtype="bfloat16", quantization=kind)
        held = [p for p in model.parameters() if quantized(p)]
        weights = sum(p.numel() for p in held)
        stored = sum(p.stored_bytes for p in held)
        assert bits / 8 <= stored / weights <= 1.05 * bits / 8
        others = sum(p.numel() * p.element_size() for p in model.parameters() if not quantized(p))
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        assert resident_bytes(model) == stored + others + buffers


def test_what_cannot_be_loaded_so_is_said(tmp_path, monkeypatch):
    save("qwen3_moe", tmp_path)
    with pytest.raises(RecipeError, match="unknown format 'nf5'; did you mean 'nf4'"):
        load_model(tmp_path, quantization="nf5")
    with pytest.raises(RecipeError, match="output_loading_info: cannot be combined with"):
        load_model(tmp_path, quantization="nf4", output_loading_info=True)
    with pytest.raises(RecipeError, match="spreads the model"):
        load_model(tmp_path, quantization="nf4", device_map={"a": "cpu", "b": "meta"})
    codec.bitsandbytes.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(DependencyError, match="pip install bitsandbytes"):
        load_model(tmp_path, quantization="int8")
    codec.bitsandbytes.cache_clear()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load_model(tmp_path)
