"""An adapter over a model: all of its tensors are loaded, by name."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.files import read_adapter
from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import AdapterError
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.class_structure import class_of
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny_families
from tests.support.tiny_adapter import random_factors

IDS = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["laguna", "deepseek_ocr2", "qwen3_5_moe_text"])
def test_shared_experts_are_loaded(family, tmp_path):
    """PEFT 0.21's own loading drops them in the first two families, with no more than a warning."""
    model = tiny_families.model(family)
    model.save_pretrained(tmp_path / "base")
    section = LoraSection(rank=4, alpha=12.0, targets=["shared_experts"])
    trained = add_lora(model, section, "frozen")
    random_factors(trained, 0.2)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    base = open_checkpoint(tmp_path / "base")
    adapter = open_adapter(tmp_path / "adapter", base)
    stock = class_of(base.model_config).from_pretrained(base.folder).eval()
    with torch.no_grad():
        expected = trained.eval()(input_ids=IDS).logits
        plain = stock(input_ids=IDS).logits
        loaded = with_adapter(stock, adapter)(input_ids=IDS).logits
    assert (expected - plain).norm() > 0.01 * expected.norm()
    assert torch.allclose(expected, loaded, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["missing", "unknown"])
def test_a_tensor_without_its_counterpart_is_refused(wrong, tmp_path):
    model = tiny_families.model("glm4_moe")
    model.save_pretrained(tmp_path / "base")
    trained = add_lora(model, LoraSection(rank=4, targets=["attention"]), "frozen")
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "layers.2." in key and "lora_B" in key)
    tensor = tensors.pop(key)
    if wrong == "unknown":
        tensors |= {key: tensor, key.replace("self_attn", "self_attention"): tensor.clone()}
    save_file(tensors, file)
    base = open_checkpoint(tmp_path / "base")
    stock = class_of(base.model_config).from_pretrained(base.folder)
    from moe_finetune.checkpoint.adapters.peft_model import fill, wrap

    opened = read_adapter(tmp_path / "adapter")
    with pytest.raises(AdapterError, match="is missing" if wrong == "missing" else "no place"):
        fill(wrap(stock, opened), opened)
    with pytest.raises(AdapterError):
        open_adapter(tmp_path / "adapter", base)
