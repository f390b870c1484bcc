"""Every defect of a tensor at one gate, and every verb behind that gate; nothing is written.

The engines are never started: the gate comes before them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.files import BASE_KEY
from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.weight_files import fingerprint
from moe_finetune.cli import main
from moe_finetune.errors import AdapterError, CheckpointError
from moe_finetune.upcycle.dense_parents import load_dense
from tests.support import tiny
from tests.support.tables import TINY_FAMILIES

pytestmark = pytest.mark.faults

SHARD, ADAPTER = "model.safetensors", "adapter_model.safetensors"
ATTENTION = "model.layers.1.self_attn.k_proj.weight"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
NORM = "model.norm.weight"
A = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
STACK = "base_model.model.model.layers.2.mlp.experts.lora_B.weight"


def missing(tensors, name):
    del tensors[name]


def extra(tensors, name):
    tensors[name.replace(".1.", ".1.more.").replace(".2.", ".2.more.")] = tensors[name].clone()


def renamed(tensors, name):
    tensors[name.replace("_proj", "_prj").replace("lora_B", "lora_C")] = tensors.pop(name)


def nan(tensors, name):
    tensors[name].view(-1)[-3] = torch.nan


def infinite(tensors, name):
    tensors[name].view(-1)[1] = -torch.inf


def as_bytes(tensors, name):
    tensors[name] = tensors[name].to(torch.int8)


def relabelled(tensors, name):
    tensors[name] = tensors[name].float().view(torch.int32)


def transposed(tensors, name):
    tensors[name] = tensors[name].T.contiguous()


def doubled(tensors, name):
    tensors[name] = torch.cat([tensors[name]] * 2)


DEFECTS = [missing, extra, renamed, nan, infinite, as_bytes, relabelled, transposed, doubled]
VERBS = {
    "inspect": ["inspect", "base"],
    "convert": ["convert", "base", "-o", "out"],
    "merge": ["merge", "adapter", "--base", "base", "-o", "out"],
    "train": ["train", "recipe.yaml", "-o", "out"],
    "eval hf": ["eval", "base", "-s", "suite/local.yaml", "-b", "hf", "-o", "out"],
    "eval vllm": ["eval", "base", "-s", "suite/local.yaml", "-b", "vllm", "-o", "out"],
    "eval adapter": [
        "eval", "base", "-s", "suite/local.yaml", "-b", "hf", "--adapter", "adapter", "-o", "out"
    ],
    "analyze": ["analyze", "base", "-d", "train.jsonl", "-o", "out"],
    "analyze adapter": [
        "analyze", "base", "-d", "train.jsonl", "--adapter", "adapter", "-o", "out"
    ],
    "serve": ["serve", "base"],
}  # fmt: skip
WITH_ADAPTER = ("merge", "eval adapter", "analyze adapter")


def damage(file: Path, defect, name: str) -> str:
    """Put the defect into the file; the name that a message about it must hold."""
    tensors = load_file(file)
    before = set(tensors)
    defect(tensors, name)
    save_file(tensors, file, {"format": "pt"})
    new = set(tensors) - before
    return (name if not new or defect is renamed else new.pop()).removeprefix("base_model.model.")


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_of_a_checkpoint_is_refused(here, defect):
    name = damage(here / "base" / SHARD, defect, EXPERT)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint("base", values=True)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_checks_its_checkpoint(here, refused, verb):
    """Its values, too, where it reads weights."""
    defect = renamed if verb == "inspect" else nan
    refused(VERBS[verb], damage(here / "base" / SHARD, defect, EXPERT))


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_of_an_adapter_is_refused(here, defect):
    named = A if defect is missing else STACK
    name = damage(here / "adapter" / ADAPTER, defect, named)
    if defect in (missing, renamed):
        name = name.partition("_proj" if named is A else ".lora_")[0]
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        check_adapter("adapter", open_checkpoint("base"))


@pytest.mark.parametrize("verb", WITH_ADAPTER)
def test_every_verb_checks_its_adapter(here, refused, verb):
    refused(VERBS[verb], damage(here / "adapter" / ADAPTER, extra, STACK))


def test_half_an_adapter(here):
    """Both factors of a layer are gone: only its config tells."""
    tensors = load_file(here / "adapter" / ADAPTER)
    for factor in "AB":
        del tensors[A.replace("lora_A", f"lora_{factor}")]
    save_file(tensors, here / "adapter" / ADAPTER, {"format": "pt"})
    with pytest.raises(AdapterError, match=r"model\.layers\.1\.self_attn\.k_proj\.lora_A\.weight"):
        check_adapter("adapter", open_checkpoint("base"))


def test_an_adapter_of_another_base(here, refused):
    """Equal names and shapes; one number of one expert differs."""
    tensors = load_file(here / "base" / SHARD)
    tensors[EXPERT].view(-1)[77] += 0.5
    save_file(tensors, here / "base" / SHARD, {"format": "pt"})
    refused(VERBS["merge"], "was trained on another base", "--base")


def test_the_warning_comes_once_a_folder_wherever_it_lies(here, caplog, monkeypatch):
    """A relative name names another folder after a change of directory."""
    (here / "adapter" / "moe_finetune.json").unlink()
    shutil.copytree(here, here / "elsewhere")
    check_adapter("adapter", open_checkpoint("base"))
    check_adapter("adapter", open_checkpoint("base"))
    monkeypatch.chdir(here / "elsewhere")
    check_adapter("adapter", open_checkpoint("base"))
    assert caplog.text.count("does not record its base") == 2


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_gate_knows_every_family(tiny_checkpoint, tmp_path, family):
    """Any one tensor gone, whichever it is, is missed; as published nothing is."""
    base = tiny_checkpoint(family)
    names = list(open_checkpoint(base, values=True).tensors)
    shutil.copytree(base, tmp_path / family)
    whole = load_file(tmp_path / family / SHARD)
    assert sorted(names) == sorted(whole)
    for name in names[:: max(1, len(names) // 7)]:
        save_file({k: v for k, v in whole.items() if k != name}, tmp_path / family / SHARD)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_checkpoint(tmp_path / family)


@pytest.mark.parametrize("defect", [missing, nan, transposed])
def test_a_dense_model_for_upcycling(tmp_path, defect):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    load_dense(tmp_path)
    name = damage(tmp_path / SHARD, defect, ATTENTION)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_dense(tmp_path)


# What a config may say


CONFIGS = [
    ({"_attn_implementation": "kernels-community/flash-attn"}, "_attn_implementation"),
    ({"attn_implementation": {"": "a/b:c"}}, "attn_implementation"),
    ({"experts_implementation": "deepgemm"}, "experts_implementation"),
    ({"text_config": {"_attn_implementation": "a/b@v1"}}, "_attn_implementation"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_local_experts": 10**9}, "num_local_experts"),
    ({"num_experts_per_tok": 99}, "num_experts_per_tok"),
    ({"hidden_size": 10**30}, "hidden_size"),
    ({"hidden_act": "sillu"}, "hidden_act"),
    ({"torch_dtype": "float99"}, "torch_dtype"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ({"rope_parameters": {"rope_type": "nope"}}, "config.json"),
    ({"mlp_only_layers": 4}, "config.json"),
    ({"model_type": ["qwen3_moe"]}, "model_type"),
    ({"num_attention_heads": 5}, "self_attn"),
]


@pytest.mark.parametrize(("changes", "named"), CONFIGS, ids=[str(c[0])[:50] for c in CONFIGS])
def test_a_config_that_no_checkpoint_has(here, refused, changes, named):
    file = here / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    refused(VERBS["inspect"], named)


def test_no_kernel_of_the_hub_reaches_a_loader(tiny_checkpoint):
    with pytest.raises(ValueError, match="never executed"):
        load_model(tiny_checkpoint("qwen3_moe"), attn_implementation="kernels-community/x")
    with pytest.raises(ImportError, match="flash_attn is not installed"):
        load_model(tiny_checkpoint("qwen3_moe"), attn_implementation="flash_attention_2")


def test_a_pickle_is_never_opened(here, refused, monkeypatch):
    opened = []
    monkeypatch.setattr(torch, "load", lambda *a, **k: opened.append(a))
    (here / "adapter" / ADAPTER).rename(here / "adapter" / "adapter_model.bin")
    refused(VERBS["merge"], "adapter_model.safetensors")
    (here / "base" / SHARD).rename(here / "base" / "pytorch_model.bin")
    refused(VERBS["eval hf"], "pytorch_model.bin")
    assert not opened


ADAPTER_CONFIGS = [
    ({"r": -1}, "'r'"),
    ({"lora_alpha": "12"}, "'lora_alpha'"),
    ({"lora_alpha": 1e400}, "adapter_config.json"),
    ({"rank_pattern": {"k_proj": 0}}, "'k_proj'"),
    ({"rank_pattern": {"(a": 4}}, "must map regular expressions"),
    ({"alpha_pattern": {"k_proj": None}}, "'k_proj'"),
    ({"target_modules": [3]}, "target_modules"),
    ({"modules_to_save": ["norm"]}, "norm.weight' is missing"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"use_dora": True}, "use_dora"),
    ({"target_modules": ["k_proj"]}, "q_proj"),
]


@pytest.mark.parametrize(("changes", "named"), ADAPTER_CONFIGS, ids=[str(c[0])[:50] for c in ADAPTER_CONFIGS])  # fmt: skip  # noqa: E501
def test_an_adapters_config(here, refused, changes, named):
    file = here / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    refused(VERBS["merge"], named)


def test_a_product_that_overflows_is_refused_by_merge_itself(here, refused):
    file = here / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 1e41}))
    refused(VERBS["merge"], "is not finite", "lora_alpha")


def test_merge_names_what_it_merges(here, refused, capsys):
    tensors = load_file(here / "adapter" / ADAPTER)
    tensors["base_model.model.model.norm.weight"] = torch.ones(192)
    save_file(tensors, here / "adapter" / ADAPTER, {"format": "pt"})
    refused(VERBS["merge"], "model.norm.weight")  # its config does not ask for it
    file = here / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": ["model.norm"]}))
    assert main(VERBS["merge"]) == 0
    said = capsys.readouterr()[0]
    assert "model.layers.*.self_attn.k_proj.weight: low-rank update, 3" in said
    assert "model.norm.weight: replaced by the adapter's tensor, 1" in said
    assert "model.layers.*.mlp.experts.*.down_proj.weight: low-rank update, 36" in said
    assert load_file(here / "out" / SHARD)[NORM].eq(1).all()


@pytest.mark.more
def test_training_records_its_base_by_whole_path_and_content(here, refused, capsys):
    """The adapter is merged from another folder; its base moved away, the way out is named."""
    recipe = json.loads((here / "recipe.yaml").read_text())
    recipe["trainer"] |= {"max_steps": 1, "save_strategy": "no"}
    recipe["method"], recipe["model"]["path"] = {"preset": "none"}, "base"
    (here / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(VERBS["train"]) == 0, capsys.readouterr()[1]
    config = json.loads((here / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(here / "base")
    noted = json.loads((here / "out" / "adapter" / "moe_finetune.json").read_text())
    assert noted[BASE_KEY] == fingerprint(open_checkpoint("base").tensors.values())
    assert main(["merge", "out", "-o", "merged"]) == 0
    (here / "base").rename(here / "moved")
    refused(["merge", "out", "-o", "again"], "--base", str(here / "base"))
    assert main(["merge", "out", "--base", "moved", "-o", "again"]) == 0


def test_a_fingerprint_is_of_contents_and_not_of_files(tmp_path, monkeypatch):
    """Shards do not count, any tensor's change does, above the size that is read whole too."""
    tiny.model("olmoe").save_pretrained(tmp_path / "one")
    tiny.model("olmoe").save_pretrained(tmp_path / "many", max_shard_size="900KB")
    tiny.model("olmoe", seed=1).save_pretrained(tmp_path / "other")
    for whole in (1 << 30, 0):
        monkeypatch.setattr("moe_finetune.checkpoint.weight_files._WHOLE_BYTES", whole)
        monkeypatch.setattr("moe_finetune.checkpoint.weight_files._known_prints", {})
        one, many, other = (
            fingerprint(open_checkpoint(tmp_path / name).tensors.values())
            for name in ("one", "many", "other")
        )
        assert one == many != other
