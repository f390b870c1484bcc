"""Modules besides the experts under Tinker's names, and projections that it trains in parts.

Names, order and rows as tinker-cookbook reads them (``weights/_merge_utils.py``,
``_merge_qwen3_5.py``, ``_adapter.py``); each update is written out here, part by part.
"""

import pytest
import torch

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import AdapterError
from tests.support.maker_formulas import ALPHA, RANK, Experts, save, tinker
from tests.support.tinker_parts import SPLIT, split_factors


def same_weights(model, expected):
    found = model.state_dict()
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPLIT)
def test_parts_of_a_projection_are_joined_in_their_order(name, tmp_path):
    from peft import PeftModel

    experts = Experts(name, base=tmp_path / "base", shared=True)
    tensors, config = tinker(experts)
    expected = experts.change_model()
    tensors |= split_factors(name, expected, experts.places)
    adapter = save(tmp_path / "adapter", tensors, config)
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    same_weights(type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32), expected)

    convert_adapter(adapter, experts.base, tmp_path / "peft", FORMS["peft"])
    plain = type(expected).from_pretrained(experts.base, dtype=torch.float32)
    stock = PeftModel.from_pretrained(plain, tmp_path / "peft").merge_and_unload()
    same_weights(stock, expected)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_without_factors_of_experts(rslora, tmp_path):
    """Trained with ``train_mlp=False``; its config says ``all-linear``, its tensors what it has."""
    experts = Experts("qwen3_5_moe", base=tmp_path / "base", shared=True)
    expected = experts.model
    factor = RANK**0.5 if rslora else 1
    scale = ALPHA / RANK
    head = expected.lm_head.weight
    a, b = torch.randn(RANK, head.shape[1]), torch.randn(head.shape[0], RANK)
    tensors = split_factors("qwen3_5_moe", expected, experts.places)
    tensors |= {"model.unembed_tokens.lora_A.weight": a, "model.unembed_tokens.lora_B.weight": b}
    with torch.no_grad():
        head += scale * b @ a
    options = {"target_modules": "all-linear", "use_rslora": rslora, "use_dora": False}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA / factor} | options
    adapter = save(tmp_path / "adapter", tensors, config)
    merge_adapter(experts.base, adapter, tmp_path / "merged")
    verify_merge(experts.base, adapter, tmp_path / "merged")
    same_weights(type(expected).from_pretrained(tmp_path / "merged", dtype=torch.float32), expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: {k: v for k, v in t.items() if "in_proj_k" not in k}, "in_proj_k"),
        (lambda t: {k: v for k, v in t.items() if "in_proj_v.lora_B" not in k}, "in_proj_v"),
        (lambda t: {k: v[:-1] if "in_proj_v.lora_B" in k else v for k, v in t.items()}, "outputs"),
        (
            lambda t: {k: v[:-1] if "in_proj_q.lora_A" in k else v for k, v in t.items()},
            "in_proj_q",
        ),
    ],
)
def test_parts_that_do_not_make_the_projection_are_refused(change, named, tmp_path):
    experts = Experts("qwen3_5_moe", base=tmp_path / "base", shared=True)
    tensors = split_factors("qwen3_5_moe", experts.model, experts.places)
    config = {"r": RANK, "lora_alpha": ALPHA}
    adapter = save(tmp_path / "adapter", change(tensors), config)
    with pytest.raises(AdapterError) as raised:
        open_adapter(adapter, open_checkpoint(experts.base))
    shown = str(raised.value)
    assert str(adapter) in shown and named in shown, shown


def test_parts_with_two_scales_are_refused(tmp_path):
    experts = Experts("qwen3_5_moe", base=tmp_path / "base", shared=True)
    tensors = split_factors("qwen3_5_moe", experts.model, experts.places)
    config = {"r": RANK, "lora_alpha": ALPHA, "alpha_pattern": {"in_proj_k": 30.0}}
    adapter = save(tmp_path / "adapter", tensors, config)
    with pytest.raises(AdapterError, match=r"in_proj_q.*different scales") as raised:
        open_adapter(adapter, open_checkpoint(experts.base))
    assert str(adapter) in str(raised.value)
