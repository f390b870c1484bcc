"""One adapter in the hands of two programs: converted here, trained on in stock PEFT, saved there,
and continued and merged here; and back."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.files import WEIGHTS, write_metadata
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import AdapterError
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.experts.lora_on_chosen import for_all_experts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.run.train import continue_adapter
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights
from moe_finetune.training.save_and_resume.save_trained import describe_adapter, write_adapter
from tests.support import tiny_families
from tests.support.maker_formulas import MAKERS, RANK, Experts, logits, save
from tests.support.tiny_adapter import random_factors


def batch():
    ids = torch.randint(4, 200, (2, 13), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def step(model):
    """One step of plain SGD on what trains."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()(**batch()).loss.backward()
    torch.optim.SGD(trained, lr=1.0).step()
    model.zero_grad()
    return model.eval()


def same(found, wanted):
    assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())


def in_peft(name, base, adapter):
    plain = tiny_families.model(name).from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, adapter, is_trainable=True).eval()


def here(name, base, adapter, **options):
    section = LoraSection(rank=2 * RANK, alpha=9.0, targets=["attention", "experts"], **options)
    model = add_lora(tiny_families.model(name), section, "frozen")
    continue_adapter(model, adapter, open_checkpoint(base))
    return model.eval()


def saved_here(model, folder):
    folder.mkdir()
    weights = for_all_experts(model, trained_weights(model), [])
    write_adapter(model.peft_config["default"], weights, folder)
    write_metadata(folder)
    return folder


@pytest.mark.parametrize("maker", MAKERS)
def test_a_maker_s_adapter_trains_in_peft_and_then_here_and_back(maker, tmp_path):
    name, (write, options) = "qwen3_moe", MAKERS[maker]
    experts = Experts(name, base=tmp_path / "base", **options)
    adapter = save(tmp_path / "adapter", *write(experts))
    convert_adapter(adapter, experts.base, tmp_path / "peft", FORMS["peft"])
    stock = in_peft(name, experts.base, tmp_path / "peft")
    before = logits(stock)
    wanted = logits(step(stock))
    assert (wanted - before).norm() > 1e-3 * wanted.norm()
    stock.save_pretrained(tmp_path / "stock", save_embedding_layers=False)

    merge_adapter(experts.base, tmp_path / "stock", tmp_path / "merged")
    verify_merge(experts.base, tmp_path / "stock", tmp_path / "merged")
    same(logits(tiny_families.model(name).from_pretrained(tmp_path / "merged")), wanted)

    model = here(name, experts.base, tmp_path / "stock")
    same(logits(model), wanted)
    with Recorder(model):
        step(model)
    again = logits(model)
    assert (again - wanted).norm() > 1e-3 * wanted.norm()
    same(logits(in_peft(name, experts.base, saved_here(model, tmp_path / "here"))), again)


def test_peft_trains_the_copies_of_a_shared_factor_apart(tmp_path):
    """They are ordinary factors to PEFT, so the shared form has no place for them any more."""
    name, base = "qwen3_moe", tmp_path / "base"
    tiny_families.model(name).save_pretrained(base)
    section = LoraSection(rank=RANK, alpha=7.5, targets=["experts"], shared_outer=True)
    model = add_lora(tiny_families.model(name), section, "frozen")
    torch.manual_seed(5)
    random_factors(model, 0.1)
    adapter = saved_here(model, tmp_path / "adapter")
    stock = in_peft(name, base, adapter)
    stock.save_pretrained(tmp_path / "untouched", save_embedding_layers=False)
    same(logits(here(name, base, tmp_path / "untouched", shared_outer=True)), logits(model))
    wanted = logits(step(stock))
    stock.save_pretrained(tmp_path / "stock", save_embedding_layers=False)
    with pytest.raises(AdapterError, match=r"lora_[AB]\.weight' differs between experts"):
        here(name, base, tmp_path / "stock", shared_outer=True)
    with pytest.raises(AdapterError, match="differ"):
        convert_adapter(tmp_path / "stock", base, tmp_path / "refused", FORMS["shared-outer"])
    same(logits(here(name, base, tmp_path / "stock")), wanted)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_peft_trains_on_a_shared_expert_s_gate(train, tmp_path):
    name, base = "qwen2_moe", tmp_path / "base"
    tiny_families.model(name).save_pretrained(base)
    section = LoraSection(rank=RANK, alpha=7.5, targets=["experts"], shared_expert_gate=train)
    model = add_lora(tiny_families.model(name), section, "frozen")
    torch.manual_seed(5)
    random_factors(model, 0.1)
    stock = in_peft(name, base, saved_here(model, tmp_path / "adapter"))
    same(logits(stock), logits(model.eval()))
    gates = {n: p.clone() for n, p in stock.named_parameters()
             if "shared_expert_gate" in n and p.requires_grad}  # fmt: skip
    wanted = logits(step(stock))
    assert gates and all(not torch.equal(p, stock.get_parameter(n)) for n, p in gates.items())
    stock.save_pretrained(tmp_path / "stock", save_embedding_layers=False)
    same(logits(here(name, base, tmp_path / "stock", shared_expert_gate=train)), wanted)


@pytest.mark.parametrize(
    ("train", "damage", "words"),
    [
        ("lora", lambda gates: gates.pop(min(gates)), "missing|describe"),
        ("full", lambda gates: gates.pop(min(gates)), "missing|describe"),
        ("full", lambda gates: gates.update({min(gates): torch.ones(2, 96)}), r"\[2, 96\]"),
        ("lora", lambda gates: gates.update({min(gates): torch.ones(RANK, 5)}), r"\[3, 5\]"),
        ("full", lambda gates: gates.update({min(gates): torch.full((1, 96), torch.nan)}), "NaN"),
    ],
)
def test_a_damaged_gate_is_refused_with_its_key(train, damage, words, tmp_path):
    name, base = "qwen2_moe", tmp_path / "base"
    tiny_families.model(name).save_pretrained(base)
    section = LoraSection(rank=RANK, alpha=7.5, targets=["experts"], shared_expert_gate=train)
    model = add_lora(tiny_families.model(name), section, "frozen")
    random_factors(model, 0.1)
    adapter = saved_here(model, tmp_path / "adapter")
    tensors = load_file(adapter / WEIGHTS)
    gates = {key: tensors.pop(key) for key in list(tensors) if "shared_expert_gate" in key}
    damage(gates)
    save_file(tensors | gates, adapter / WEIGHTS)
    with pytest.raises(AdapterError, match=words) as refused:
        merge_adapter(base, adapter, tmp_path / "merged")
    assert "layers.0.mlp.shared_expert_gate" in str(refused.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("form", ["peft", "stacked", "shared-outer"])
def test_a_training_state_with_factors_stored_once_is_read_in_each_form(form, tmp_path):
    tiny_families.model("qwen3_moe").save_pretrained(tmp_path / "base")
    section = LoraSection(rank=RANK, alpha=9.0, targets=["experts"], shared_outer=True)
    model = add_lora(tiny_families.model("qwen3_moe"), section, "frozen")
    random_factors(model, 0.1)
    state = tmp_path / "state"
    state.mkdir()
    write_adapter(model.peft_config["default"], trained_weights(model), state)
    describe_adapter(model, state, 0.0, None)
    convert_adapter(state, tmp_path / "base", tmp_path / form, FORMS[form])
    merge_adapter(tmp_path / "base", tmp_path / form, tmp_path / "merged")
    merged = tiny_families.model("qwen3_moe").from_pretrained(tmp_path / "merged")
    same(logits(merged), logits(model.eval()))
