"""``eval --adapter`` is the model that ``merge`` writes: whole vocabulary, routing bias and all."""

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune.checkpoint.adapters.files import BIAS_FILE, read_bias, write_metadata
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.moe.layers import moe_layers
from tests.checkpoint import helpers
from tests.support import tiny


@torch.no_grad()
def logits(model):
    inputs = tiny.batch(rows=2, length=9)
    return model(input_ids=inputs["input_ids"]).logits


def test_it_is_the_merged_model(tiny_checkpoint, tmp_path):
    base = tiny_checkpoint("qwen3_moe")
    adapter = helpers.adapter(base, tmp_path / "adapter")
    write_metadata(adapter)
    merge_adapter(base, adapter, tmp_path / "merged")
    wanted, plain = logits(load_model(tmp_path / "merged")), logits(load_model(base))
    assert wanted.shape[-1] == tiny.VOCABULARY > len(tiny.tokenizer())
    with open_backend(base, "hf", adapter=adapter, batch_size=2) as opened:
        found = logits(opened.lm.model)
        assert opened.lm.model.get_input_embeddings().weight.shape[0] == tiny.VOCABULARY
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (found - plain).abs().max() > 0.1
    for backend in ("server", "vllm"):  # which would leave the adapter out
        with pytest.raises(EvaluationError, match=f"backend '{backend}' evaluates merged"):
            open_backend(base, backend, adapter=adapter)


@pytest.mark.parametrize("family", ["deepseek_v3", "olmoe"])
def test_its_routing_bias_acts(tiny_checkpoint, tmp_path, family):
    base = tiny_checkpoint(family)
    adapter = helpers.adapter(base, tmp_path / "adapter")
    layers = [layer.index for layer in moe_layers(load_model(base))]
    favoured = torch.zeros(12)
    favoured[[7, 2, 9]] = 50.0
    save_file({f"bias.{n}": favoured.clone() for n in layers}, adapter / BIAS_FILE)
    with open_backend(base, "hf", adapter=adapter, batch_size=2) as opened:
        model = opened.lm.model
        found = logits(model)
    without = logits(model)  # closing takes the bias off
    assert (found - without).abs().max() > 0.1
    if family == "deepseek_v3":
        bias = read_bias(adapter)
        merge_adapter(base, adapter, tmp_path / "merged", bias=bias)
        wanted = logits(load_model(tmp_path / "merged"))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
