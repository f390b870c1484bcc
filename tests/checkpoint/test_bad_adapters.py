"""Every defect of an adapter: one message with the place and the remedy, and nothing written."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_finetune.checkpoint.adapters.files import write_metadata
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import AdapterError
from tests.checkpoint.damage import CONFIG, QUERY, WEIGHTS, configure, edit, refuse
from tests.support import tiny


def tensors(change):
    return lambda adapter: edit(adapter / WEIGHTS, change)


def config(**changes):
    return lambda adapter: configure(adapter / CONFIG, **changes)


ADAPTERS = {
    "nan": (
        tensors(lambda found: found[QUERY].view(-1)[17].fill_(torch.nan)),
        WEIGHTS, QUERY.removeprefix("base_model.model."), "NaN",
    ),
    "rank": (config(r=6), "rank 6"),
    "parameters": (
        config(target_parameters=["mlp.experts.down_proj", "gate.weight"]),
        "mlp.experts", "target_parameters",
    ),
    "cut": (
        lambda adapter: (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-8]),
        WEIGHTS, "truncated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", ADAPTERS)
def test_a_damaged_adapter(base, adapter, tmp_path, defect):
    damage, *parts = ADAPTERS[defect]
    damage(adapter)
    refuse(base, adapter, tmp_path, AdapterError, adapter, *parts)


def in_two_files(adapter):
    factors = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    names = sorted(factors)
    for number, some in enumerate((names[:7], names[7:]), 1):
        file = f"adapter_model-{number:05d}-of-00002.safetensors"
        save_file({name: factors[name] for name in some}, adapter / file)


def renamed(change):
    def damage(adapter):
        factors = load_file(adapter / WEIGHTS)
        save_file({change(name): tensor for name, tensor in factors.items()}, adapter / WEIGHTS)

    return damage


OF_PROGRAMS = {
    "in two files": (in_two_files, "adapter_model-00001-of-00002"),
    "with PEFT's name of the adapter": (
        renamed(lambda name: re.sub(r"(lora_[AB])", r"\1.default", name)),
        "'.default'",
    ),
    "without PEFT's prefix": (
        renamed(lambda name: name.removeprefix("base_model.model.")),
        "does not start with",
    ),
}


@pytest.mark.parametrize("program", OF_PROGRAMS)
def test_what_the_message_advises_helps(base, adapter, tmp_path, program, monkeypatch):
    damage, part = OF_PROGRAMS[program]
    expected = load_file(adapter / WEIGHTS)
    damage(adapter)
    with pytest.raises(AdapterError, match=re.escape(part)) as refused:
        merge_adapter(base, adapter, tmp_path / "out")
    advice = re.search(r"save_file\(.*\)", str(refused.value))
    monkeypatch.chdir(adapter)
    names = {"save_file": save_file, "load_file": load_file, "file": WEIGHTS}
    exec(advice[0], names | {"files": sorted(adapter.glob("*.safetensors"))})
    assert load_file(adapter / WEIGHTS).keys() == expected.keys()
    assert merge_adapter(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_a_config_without_a_value_that_scales_names_it(base, adapter, tmp_path, key):
    """As Tinker's, which does not say either what it is."""
    kept = json.loads((adapter / CONFIG).read_text())
    del kept[key], kept["peft_type"]
    (adapter / CONFIG).write_text(json.dumps(kept))
    refuse(base, adapter, tmp_path, AdapterError, CONFIG, f"'{key}' is missing", "add the value")


def test_a_config_that_names_no_targets_lists_those_of_the_file(base, adapter, tmp_path):
    configure(adapter / CONFIG, target_modules=None, target_parameters=None)
    refuse(base, adapter, tmp_path, AdapterError, CONFIG, "target_modules", "q_proj", "experts")


def test_base_given_as_adapter(base, tmp_path):
    refuse(base, base, tmp_path, AdapterError, "adapter_config.json is missing")


def test_adapter_of_another_shape(adapter, tmp_path):
    other = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", moe_intermediate_size=40).save_pretrained(other)
    parts = ("experts", "[48, 48]", "[48, 40]", other, "another base")
    refuse(other, adapter, tmp_path, AdapterError, *parts)


def test_adapter_of_another_family(bases, adapter, tmp_path):
    other = bases("deepseek_v2")
    refuse(other, adapter, tmp_path, AdapterError, "layers.0.mlp.experts", other, "another base")


def test_adapter_with_more_layers(adapter, tmp_path):
    other = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", num_hidden_layers=2).save_pretrained(other)
    refuse(other, adapter, tmp_path, AdapterError, "layers.2", other)


def test_adapter_with_fewer_layers(adapter, tmp_path):
    other = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", num_hidden_layers=5).save_pretrained(other)
    parts = ("is missing", "nothing of that layer; give its own base")
    refuse(other, adapter, tmp_path, AdapterError, *parts)


@pytest.mark.parametrize(
    ("experts", "part"),
    [
        ({1: [3, 12]}, "expert 12"),
        ({1: [0, 1]}, "layers.0"),
        ({1: [4, 4]}, "moe_finetune.json"),
    ],
)
def test_selection_that_does_not_fit(base, adapter, tmp_path, experts, part):
    edit(
        adapter / WEIGHTS,
        lambda tensors: [tensors.pop(key) for key in list(tensors) if ".2.mlp.experts." in key],
    )
    if part != "layers.0":
        edit(
            adapter / WEIGHTS,
            lambda tensors: [tensors.pop(key) for key in list(tensors) if ".0.mlp.experts." in key],
        )
    write_metadata(adapter, experts=experts)
    refuse(base, adapter, tmp_path, AdapterError, part)


def test_tied_head(adapter, tmp_path):
    base = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", tie_word_embeddings=True).save_pretrained(base)
    configure(base / "config.json", tie_word_embeddings=True)

    def add(tensors):
        for factor, shape in (("A", (4, 192)), ("B", (400, 4))):
            tensors[f"base_model.model.lm_head.lora_{factor}.weight"] = torch.zeros(shape)

    edit(adapter / WEIGHTS, add)
    refuse(base, adapter, tmp_path, AdapterError, "lm_head", "ties")


def test_an_adapter_of_a_resized_vocabulary(tmp_path):
    """What the message advises helps: the base is resized, too."""
    from peft import LoraConfig, get_peft_model

    base, adapter, resized = (tmp_path / name for name in ("base", "adapter", "resized"))
    tiny.save("qwen3_moe", base)
    model = load_model(base, dtype="float32")
    size = model.config.vocab_size + 6
    model.resize_token_embeddings(size, mean_resizing=False)
    saved = ["embed_tokens", "lm_head"]
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    trained = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.03125 if parameter.requires_grad else 0)
    trained.save_pretrained(adapter)
    advice = f"model.resize_token_embeddings({size})"
    refuse(base, adapter, tmp_path, AdapterError, "resized the vocabulary", advice)
    again = load_model(base, dtype="float32")
    again.resize_token_embeddings(size, mean_resizing=False)
    again.save_pretrained(resized)
    merge_adapter(resized, adapter, tmp_path / "out")
    merged = load_model(tmp_path / "out", dtype="float32")
    expected = trained.base_model.model.model.embed_tokens.modules_to_save.default.weight
    assert torch.equal(merged.model.embed_tokens.weight, expected)


def test_an_adapter_of_a_tied_head_merges_into_an_untied_copy(tmp_path):
    from peft import LoraConfig, get_peft_model

    base, adapter, untied = (tmp_path / name for name in ("base", "adapter", "untied"))
    tiny.save("qwen3_moe", base, tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    trained = get_peft_model(load_model(base, dtype="float32"), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.03125 if parameter.requires_grad else 0)
    trained.save_pretrained(adapter)
    refuse(base, adapter, tmp_path, AdapterError, "tie_word_embeddings=False", "lm_head.weight")
    copy = AutoModelForCausalLM.from_pretrained(base, tie_word_embeddings=False)
    copy.lm_head.weight = torch.nn.Parameter(copy.get_input_embeddings().weight.clone())
    copy.save_pretrained(untied)
    merge_adapter(untied, adapter, tmp_path / "out")
    ids = torch.arange(5, 12)[None]
    merged = load_model(tmp_path / "out", dtype="float32")
    torch.testing.assert_close(merged(ids).logits, trained(ids).logits, atol=1e-4, rtol=1e-4)
