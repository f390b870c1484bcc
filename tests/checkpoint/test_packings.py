"""``convert ADAPTER --to FORM``: every form makes the same changes; what it cannot hold is said."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.files import write_metadata
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import NumericsError
from tests.checkpoint import helpers
from tests.checkpoint.helpers import EXPERTS, select
from tests.support import tiny, tiny_families
from tests.support.tiny_adapter import adapted

WEIGHTS = "model.safetensors"
KEYS = "adapter_model.safetensors"


def changes(base, adapter, folder):
    """What a merge of the adapter adds to each tensor."""
    merge_adapter(base, adapter, folder)
    before, after = load_file(base / WEIGHTS), load_file(folder / WEIGHTS)
    return {name: after[name] - tensor for name, tensor in before.items()}


def same(one, other):
    assert one.keys() == other.keys()
    largest = max(float(change.abs().max()) for change in one.values())
    assert largest > 1e-3
    for name, change in one.items():
        assert float((change - other[name]).abs().max()) < 1e-6 + 1e-6 * largest, name


def convert(adapter, base, to, output):
    command = ["convert", str(adapter), "--to", to, "--base", str(base), "--output", str(output)]
    assert main(command) == 0
    return output


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """name -> base and an adapter on everything."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = tiny_families.model(name)
            model.save_pretrained(folder / "base")
            peft = adapted(model, "lora")
            peft.save_pretrained(folder / "adapter", save_embedding_layers=False)
            made[name] = folder
        return made[name]

    return get


@pytest.mark.parametrize("name", ["glm4_moe", "phimoe", "nemotron_h"])
def test_per_expert_and_back(family, name, tmp_path, capsys):
    folder = family(name)
    base, adapter = folder / "base", folder / "adapter"
    write_metadata(adapter, None, 0.1, method="aux_loss")
    split = convert(adapter, base, "per-expert", tmp_path / "split")
    assert "(as per-expert)" in capsys.readouterr().out
    keys = load_file(split / KEYS)
    stored = load_file(base / WEIGHTS)
    for key in keys:
        path, _, _ = key.removeprefix("base_model.model.").partition(".lora_")
        assert f"{path}.weight" in stored, key
    assert any(".experts.7." in key for key in keys)
    assert json.loads((split / "moe_finetune.json").read_text())["method"] == "aux_loss"
    expected = changes(base, adapter, tmp_path / "one")
    same(expected, changes(base, split, tmp_path / "two"))
    verify_merge(base, split, tmp_path / "two")
    stacked = convert(split, base, "peft", tmp_path / "stacked")
    same(expected, changes(base, stacked, tmp_path / "three"))
    model = tiny_families.model(name)
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        logits = helpers.with_adapter(base, stacked)(input_ids=ids).logits
        merged = helpers.load(tmp_path / "one")(input_ids=ids).logits
    assert (logits - plain).norm() > 0.01 * plain.norm()
    assert torch.allclose(logits, merged, rtol=0, atol=1e-4 * float(merged.abs().max()))


def test_ranks_and_scalings_by_part(bases, tmp_path):
    base = bases("qwen3_moe")
    adapter = helpers.adapter(
        base,
        tmp_path / "adapter",
        use_rslora=True,
        rank_pattern={"down_proj": 3, "o_proj": 7, r"layers\.1\..*gate_up_proj": 5},
        alpha_pattern={"gate_up_proj": 20, "q_proj": 3},
    )
    split = convert(adapter, base, "per-expert", tmp_path / "split")
    same(changes(base, adapter, tmp_path / "one"), changes(base, split, tmp_path / "two"))


def test_a_converted_adapter_of_square_experts_merges(tmp_path):
    model = tiny.model("qwen3_moe", moe_intermediate_size=96)  # gate_up_proj is 192 x 192
    model.save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    adapted(model, "lora").save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    split = convert(tmp_path / "adapter", base, "per-expert", tmp_path / "split")
    stacked = convert(split, base, "peft", tmp_path / "stacked")
    same(
        changes(base, tmp_path / "adapter", tmp_path / "1"), changes(base, stacked, tmp_path / "2")
    )


def test_dora_and_whole_tensors(bases, tmp_path):
    base = bases("qwen3_moe")
    adapter = helpers.adapter(
        base, tmp_path / "adapter", use_dora=True, target_parameters=None, modules_to_save=["gate"]
    )
    split = convert(adapter, base, "per-expert", tmp_path / "split")
    same(changes(base, adapter, tmp_path / "one"), changes(base, split, tmp_path / "two"))


def test_dora_of_a_fused_module_has_each_files_own_norms(tmp_path):
    """MiniMax-M3's shared experts: gate and up are one module, and two tensors in the files."""
    model = tiny_families.model("minimax_m3_vl")
    model.save_pretrained(tmp_path / "base")
    fused = r".*language_model.*shared_experts\.gate_up_proj"
    peft = get_peft_model(model, LoraConfig(r=3, target_modules=fused, use_dora=True))
    helpers.randomize(peft, 3, 0.05)
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    split = convert(tmp_path / "adapter", tmp_path / "base", "per-expert", tmp_path / "split")
    expected = changes(tmp_path / "base", tmp_path / "adapter", tmp_path / "one")
    same(expected, changes(tmp_path / "base", split, tmp_path / "two"))


SAVED = [
    ("mixtral", "mlp.gate", ["gate"]),
    ("minimax", "mlp.gate", ["block_sparse_moe.gate"]),  # as self_attn has another gate
    ("phimoe", "mlp.router", ["gate"]),
    ("qwen2_moe", "gate", ["gate"]),  # and shared_expert_gate
    ("qwen2_moe", "mlp.gate", ["mlp.gate"]),
    ("ernie4_5_moe", "gate", ["gate"]),
    ("exaone_moe", "gate", ["gate"]),
    ("glm4_moe", "norm", ["norm"]),  # and the layers' norms
    ("granitemoe", "experts", ["input_linear", "output_linear"]),
]


@pytest.mark.parametrize(("name", "saved", "in_files"), SAVED)
def test_what_trained_in_full_has_the_name_of_each_form(name, saved, in_files, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_families.model(name)
    model.save_pretrained(base)
    options = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    peft = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options))
    helpers.randomize(peft, 3, 0.05)
    peft.save_pretrained(adapter, save_embedding_layers=False)
    split = convert(adapter, base, "per-expert", tmp_path / "split")
    assert json.loads((split / "adapter_config.json").read_text())["modules_to_save"] == in_files
    expected = changes(base, adapter, tmp_path / "1")
    same(expected, changes(base, split, tmp_path / "2"))
    assert verify_merge(base, split, tmp_path / "2").layers
    back = convert(split, base, "peft", tmp_path / "back")
    same(expected, changes(base, back, tmp_path / "3"))
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        logits = helpers.with_adapter(base, back)(input_ids=ids).logits
        merged = helpers.load(tmp_path / "1")(input_ids=ids).logits
    assert torch.allclose(logits, merged, rtol=0, atol=1e-4 * float(merged.abs().max()))


def test_saved_tensors_that_share_a_module_in_the_files_are_named(tmp_path, capsys):
    """Kimi Linear's decay is in a module of its own in the class, in the files in attention's."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_families.model("kimi_linear")
    model.save_pretrained(base)
    options = {"target_modules": ["o_proj"], "modules_to_save": ["gate"]}
    get_peft_model(model, LoraConfig(r=3, **options)).save_pretrained(adapter)
    command = ["convert", str(adapter), "--base", str(base), "--to", "per-expert"]
    assert main([*command, "--output", str(tmp_path / "no")]) == 2
    assert "A_log' shares its module with tensors" in " ".join(capsys.readouterr().err.split())


def test_an_embedding_saved_beside_its_factors_is_kept(bases, tmp_path):
    """PEFT saves both for LoRA on an embedding; a merge and each form have both."""
    base = bases("qwen3_moe")
    adapter = helpers.adapter(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    tensors = load_file(adapter / KEYS)
    stored = load_file(base / WEIGHTS)["model.embed_tokens.weight"]
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = stored.roll(1, 0)
    save_file(tensors, adapter / KEYS)
    split = convert(adapter, base, "per-expert", tmp_path / "split")
    back = convert(split, base, "peft", tmp_path / "back")
    expected = changes(base, adapter, tmp_path / "1")
    same(expected, changes(base, split, tmp_path / "2"))
    same(expected, changes(base, back, tmp_path / "3"))
    for number, folder in enumerate((adapter, split, back), 1):
        verify_merge(base, folder, tmp_path / f"{number}")
    merged = load_file(tmp_path / "2" / WEIGHTS)
    merged["model.embed_tokens.weight"] -= 1e-3
    save_file(merged, tmp_path / "2" / WEIGHTS, {"format": "pt"})
    with pytest.raises(NumericsError, match=r"'model\.embed_tokens\.weight' is not base"):
        verify_merge(base, adapter, tmp_path / "2")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_trained_get_the_names_of_each_form(bias, tmp_path):
    base = tmp_path / "base"
    model = tiny_families.model("qwen2_moe")
    model.save_pretrained(base)
    options = {"bias": bias, "target_modules": ["q_proj", "o_proj"]}
    peft = get_peft_model(model, LoraConfig(r=2, lora_alpha=3, **options))
    helpers.randomize(peft, 3, 0.05)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if name.endswith("_proj.bias") or name.endswith("base_layer.bias"):
                parameter.add_(0.05)
    peft.save_pretrained(tmp_path / "adapter")
    split = convert(tmp_path / "adapter", base, "per-expert", tmp_path / "split")
    keys = {key.removeprefix("base_model.model.model.layers.1.") for key in load_file(split / KEYS)}
    assert "self_attn.q_proj.base_layer.bias" in keys
    assert ("self_attn.k_proj.bias" in keys) == (bias == "all")
    back = convert(split, base, "peft", tmp_path / "back")
    expected = changes(base, tmp_path / "adapter", tmp_path / "1")
    same(expected, changes(base, split, tmp_path / "2"))
    same(expected, changes(base, back, tmp_path / "3"))


def test_chosen_experts_become_an_ordinary_adapter(bases, adapters, tmp_path):
    base, full = bases("qwen3_moe"), adapters("qwen3_moe")
    small = select(full, base, {1: [9, 2, 5], 2: list(range(11))}, tmp_path / "small")
    whole = convert(small, base, "peft", tmp_path / "whole")
    assert "experts" not in json.loads((whole / "moe_finetune.json").read_text())
    split = convert(small, base, "per-expert", tmp_path / "split")
    expected = changes(base, small, tmp_path / "one")
    for number, folder in enumerate((whole, split)):
        same(expected, changes(base, folder, tmp_path / f"{number}"))


def test_files_with_stacks_have_no_modules_of_experts(family, tmp_path, capsys):
    folder = family("gpt_oss")
    command = ["convert", str(folder / "adapter"), "--base", str(folder / "base")]
    assert main([*command, "--to", "per-expert", "--output", str(tmp_path / "no")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "no program has a module for each matrix" in shown and "--to peft" in shown
    assert not (tmp_path / "no").exists()
    assert main([*command, "--output", str(tmp_path / "no")]) == 2
    assert "--to peft, --to per-expert or --to vllm" in capsys.readouterr().err


def test_what_vllm_does_not_read_is_refused(bases, tmp_path, capsys):
    base = bases("qwen3_moe")
    attention = {"target_parameters": None, "target_modules": ["q_proj"]}
    for options, part in [
        ({"modules_to_save": ["gate"]}, "trained in full"),
        ({"use_dora": True}, "no DoRA"),
        ({"target_parameters": [EXPERTS[0]]}, "only one of the experts' two parameters"),
    ]:
        adapter = helpers.adapter(base, tmp_path / part[:4], **attention | options)
        command = ["convert", str(adapter), "--to", "vllm", "--base", str(base), "--output"]
        assert main([*command, str(tmp_path / "no")]) == 2
        assert part in " ".join(capsys.readouterr().err.split())


def test_a_bias_goes_along_and_a_strange_tensor_does_not(bases, tmp_path, capsys):
    base = bases("deepseek_v3")
    adapter = helpers.adapter(base, tmp_path / "adapter")
    save_file({"bias.1": torch.zeros(12)}, adapter / "router_bias.safetensors")
    out = convert(adapter, base, "peft", tmp_path / "out")
    assert (out / "router_bias.safetensors").is_file()
    tensors = load_file(adapter / KEYS)
    save_file(
        tensors | {"base_model.model.strange.lora_A.weight": torch.zeros(4, 4)}, adapter / KEYS
    )
    command = ["convert", str(adapter), "--to", "peft", "--base", str(base)]
    assert main([*command, "--output", str(tmp_path / "no")]) == 2
    assert "strange" in capsys.readouterr().err
