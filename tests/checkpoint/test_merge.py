"""Merged checkpoint = base + adapter, in transformers and stock PEFT."""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import (
    AdapterError,
    MoeFinetuneError,
    UnsupportedModelError,
)
from tests.checkpoint import helpers
from tests.checkpoint.helpers import EXPERTS, logits, select
from tests.support import names_on_disk, tiny, tiny_families
from tests.support.tables import TINY_FAMILIES
from tests.support.tiny_adapter import adapted

MOONLIGHT_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def assert_same(found, wanted):
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_merged_equals_base_and_adapter(bases, adapters, family, tmp_path):
    base, adapter, merged = bases(family), adapters(family), tmp_path / family
    report = merge_adapter(base, adapter, merged)
    wanted = logits(helpers.with_adapter(base, adapter))
    assert (wanted - logits(helpers.load(base))).norm() > 0.02 * wanted.norm()
    assert_same(logits(helpers.load(merged)), wanted)

    opened, out = open_checkpoint(base), open_checkpoint(merged)
    assert {n: (i.dtype, i.shape) for n, i in out.tensors.items()} == {
        n: (i.dtype, i.shape) for n, i in opened.tensors.items()
    }
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (merged / name).read_bytes() == (base / name).read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {family}
    assert len(report.changed) + len(report.copied) == len(opened.tensors)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("target", EXPERTS)
def test_one_fused_parameter(bases, family, target, tmp_path):
    """A single wrapper has the bare key whichever parameter it holds."""
    base = bases(family)
    adapter = helpers.adapter(base, tmp_path / "a", target_parameters=[target])
    report = merge_adapter(base, adapter, tmp_path / family)
    assert_same(
        logits(helpers.load(tmp_path / family)), logits(helpers.with_adapter(base, adapter))
    )
    down = names_on_disk.name(family, "down", 0, 0).partition(".experts.")[2]
    assert any(name.endswith(down) for name in report.changed) == target.endswith("down_proj")


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_full_router_and_patterns(bases, family, tmp_path):
    """The router through modules_to_save, rsLoRA, and ranks and alphas by pattern."""
    base = bases(family)
    adapter = helpers.adapter(
        base,
        tmp_path / "a",
        target_parameters=list(EXPERTS),
        modules_to_save=["gate"],
        use_rslora=True,
        rank_pattern={r".*\.gate_up_proj": 3, "o_proj": 5},
        alpha_pattern={r".*layers\.1\..*down_proj": 7, "o_proj": 2},
    )
    merge_adapter(base, adapter, tmp_path / family)
    wanted = logits(helpers.with_adapter(base, adapter))
    assert_same(logits(helpers.load(tmp_path / family)), wanted)


def test_head_and_embedding(bases, tmp_path):
    base = bases("qwen3_moe")
    adapter = helpers.adapter(
        base, tmp_path / "a", target_modules=["embed_tokens", "lm_head"], target_parameters=None
    )
    merge_adapter(base, adapter, tmp_path / "m")
    wanted = logits(helpers.with_adapter(base, adapter))
    assert_same(logits(helpers.load(tmp_path / "m")), wanted)
    # Unless told otherwise, PEFT also saves what LoRA on a head or an embedding starts from, and
    # loads it again.
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, key in (("lm_head", "lm_head"), ("embed_tokens", "model.embed_tokens")):
        stored = load_file(base / "model.safetensors")[f"{key}.weight"]
        tensors[f"base_model.model.{key}.base_layer.weight"] = stored
        save_file(tensors, adapter / "adapter_model.safetensors")
        merge_adapter(base, adapter, tmp_path / name)
        assert_same(logits(helpers.load(tmp_path / name)), wanted)
    moved = stored.roll(1, 0)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = moved
    save_file(tensors, adapter / "adapter_model.safetensors")
    merge_adapter(base, adapter, tmp_path / "moved")
    wanted_moved = logits(helpers.with_adapter(base, adapter))
    assert (wanted_moved - wanted).norm() > 0.1 * wanted.norm()
    assert_same(logits(helpers.load(tmp_path / "moved")), wanted_moved)


def test_a_saved_head_that_is_gone(bases, tmp_path):
    base = bases("qwen3_moe")
    adapter = helpers.adapter(
        base, tmp_path / "a", target_parameters=None, modules_to_save=["lm_head", "embed_tokens"]
    )
    merge_adapter(base, adapter, tmp_path / "m")
    assert_same(logits(helpers.load(tmp_path / "m")), logits(helpers.with_adapter(base, adapter)))
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"'lm_head\.weight' is missing, which adapter_config"):
        merge_adapter(base, adapter, tmp_path / "refused")


@pytest.mark.parametrize("start", ["eva", "mica"])
def test_starts_that_leave_the_base(bases, start, tmp_path):
    base = bases("qwen3_moe")
    adapter = helpers.adapter(base, tmp_path / "a", target_parameters=None, init_lora_weights=start)
    merge_adapter(base, adapter, tmp_path / "m")
    assert_same(logits(helpers.load(tmp_path / "m")), logits(helpers.with_adapter(base, adapter)))


def test_saved_experts(bases, tmp_path):
    """Whole experts through modules_to_save are split back into the disk's matrices."""
    base = bases("mixtral")
    adapter = helpers.adapter(
        base, tmp_path / "a", target_parameters=None, modules_to_save=["mlp.experts"]
    )
    merge_adapter(base, adapter, tmp_path / "mixtral")
    wanted = logits(helpers.with_adapter(base, adapter))
    assert_same(logits(helpers.load(tmp_path / "mixtral")), wanted)


NAMED = ["layers.0.mlp.experts.4.up_proj", "layers.2.mlp.experts.9.up_proj", "v_proj"]


@pytest.mark.parametrize("targets", [NAMED, rf".*\.({'|'.join(map(re.escape, NAMED))})"])
def test_per_expert_keys_of_experts_that_the_config_names(bases, targets, tmp_path):
    """As expert-specialized fine-tuning has them; what is missing is known from the config."""
    base, adapter = bases("qwen3_moe"), tmp_path / "a"
    stored = load_file(base / "model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6}
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    keys, changed = {}, {}
    for name, weight in stored.items():
        path = name.removesuffix(".weight")
        if path.endswith(tuple(NAMED)):
            b, a = torch.randn(weight.shape[0], 3), torch.randn(3, weight.shape[1])
            for factor, values in (("A", a), ("B", b)):
                keys[f"base_model.model.{path}.lora_{factor}.weight"] = values
            changed[name] = weight + 2.0 * b @ a
    assert len(changed) == 5
    save_file(keys, adapter / "adapter_model.safetensors")
    merge_adapter(base, adapter, tmp_path / "m")
    for name, merged in load_file(tmp_path / "m" / "model.safetensors").items():
        torch.testing.assert_close(merged, changed.get(name, stored[name]), rtol=1e-6, atol=1e-5)
    for path in ("layers.1.self_attn.v_proj", "layers.2.mlp.experts.9.up_proj"):
        fewer = {key: values for key, values in keys.items() if path not in key}
        assert len(fewer) == len(keys) - 2
        save_file(fewer, adapter / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=rf"{re.escape(path)}.*is missing"):
            merge_adapter(base, adapter, tmp_path / "n")


@pytest.mark.parametrize("shape", ["sharded", "indexless", "single"])
def test_shards(bases, adapters, shape, tmp_path):
    base, merged = tmp_path / "base" / "qwen3_moe", tmp_path / "merged"
    tiny.model("qwen3_moe").save_pretrained(
        base, max_shard_size="700KB" if shape != "single" else "5GB"
    )
    index = base / "model.safetensors.index.json"
    files = sorted(p.name for p in base.glob("*.safetensors"))
    original = index.read_bytes() if index.is_file() else b""
    if shape == "indexless":
        index.unlink()
    merge_adapter(base, adapters("qwen3_moe"), merged)
    assert sorted(p.name for p in merged.glob("*.safetensors")) == files
    assert len(files) == 1 if shape == "single" else len(files) > 3
    if shape == "sharded":
        assert (merged / index.name).read_bytes() == original
    if shape == "indexless":
        written = json.loads((merged / index.name).read_bytes())
        assert written["weight_map"] == json.loads(original)["weight_map"]
        index.write_bytes(original)
    wanted = logits(helpers.with_adapter(base, adapters("qwen3_moe")))
    assert_same(logits(helpers.load(merged)), wanted)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_an_index_counts_the_bytes_that_are_written(adapters, dtype, tmp_path):
    """Published ones count otherwise; such an index stays where no tensor changes its size."""
    base, merged = tmp_path / "base" / "qwen3_moe", tmp_path / "merged"
    model = tiny.model("qwen3_moe", dtype=torch.bfloat16)
    model.save_pretrained(base, max_shard_size="400KB")
    index = base / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    total = content["metadata"]["total_size"]
    content["metadata"]["total_size"] = total - 4
    index.write_text(json.dumps(content))
    merge_adapter(base, adapters("qwen3_moe"), merged, dtype=dtype)
    written = json.loads((merged / index.name).read_text())
    assert written["metadata"]["total_size"] == (2 * total if dtype else total - 4)
    assert written["weight_map"] == content["weight_map"]


def test_untouched_bytes_and_metadata(bases, tmp_path):
    base = bases("deepseek_v2")
    adapter = helpers.adapter(base, tmp_path / "a", target_parameters=["gate.weight"])
    report = merge_adapter(base, adapter, tmp_path / "m")
    opened, out = open_checkpoint(base), open_checkpoint(tmp_path / "m")
    changed = report.changed
    for name, info in opened.tensors.items():
        new = out.tensors[name]
        same = [f.file.read_bytes()[f.offset : f.offset + f.size] for f in (info, new)]
        assert (same[0] == same[1]) == (name not in changed)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_bfloat16_is_rounded_once(bases, adapters, tmp_path):
    """bf16 output is the rounding of the float32 sum, for a bf16 base and for a conversion."""
    base = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(base)
    merge_adapter(base, adapters("qwen3_moe"), tmp_path / "m")
    wide = merge_adapter(base, adapters("qwen3_moe"), tmp_path / "m32", dtype="float32")
    others = len(wide.contents) - len(wide.changed)
    assert others and f"0 copied byte for byte, {others} converted" in wide.counts()
    merge_adapter(bases("qwen3_moe"), adapters("qwen3_moe"), tmp_path / "m16", dtype="bfloat16")
    half, full = (load_file(tmp_path / n / "model.safetensors") for n in ("m", "m32"))
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert {t.dtype for t in full.values()} == {torch.float32}
    for name in half:
        assert torch.equal(half[name], full[name].bfloat16()), name
    wanted = logits(helpers.with_adapter(base, adapters("qwen3_moe")))
    assert_same(logits(helpers.load(tmp_path / "m32")), wanted)
    assert json.loads((tmp_path / "m16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "m16" / "model.safetensors").values()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize(
    ("family", "bias"),
    [("deepseek_v3", "mlp.gate.e_score_correction_bias"), ("deepseek_v4", "ffn.gate.bias")],
)
def test_conversion_keeps_the_routing_bias_in_float32(family, bias, tmp_path):
    model = tiny_families.model(family)
    model.save_pretrained(tmp_path / "base")
    adapted(model, "lora").save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "m", dtype="bfloat16")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    kinds = {tensor.dtype for name, tensor in tensors.items() if name.endswith(bias)}
    assert kinds == {torch.float32}
    heads = [t.dtype for n, t in tensors.items() if n.endswith(("head.weight", "q_b_proj.weight"))]
    assert set(heads) == {torch.bfloat16}


# Expert-selective LoRA


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_chosen_experts(bases, adapters, family, tmp_path):
    """Merging a selection changes the chosen experts as the whole adapter does, and no others."""
    base, full = bases(family), adapters(family)
    chosen = {1: [9, 2, 5], 2: [0, 11]}
    small = select(full, base, chosen, tmp_path / "small")
    merge_adapter(base, small, tmp_path / family)
    merge_adapter(base, full, tmp_path / "whole")
    tables = [
        load_file(f / "model.safetensors") for f in (base, tmp_path / family, tmp_path / "whole")
    ]
    for layer, experts in open_checkpoint(base).experts.items():
        for expert in range(experts):
            for part in names_on_disk.EXPERTS:
                name = names_on_disk.name(family, part, layer, expert)
                before, after, whole = (table[name] for table in tables)
                assert torch.equal(after, whole if expert in chosen.get(layer, ()) else before)
                assert not torch.equal(before, whole)
    ordinary = convert_adapter(small, base, tmp_path / "ordinary", FORMS["peft"])
    wanted = logits(helpers.with_adapter(base, ordinary))
    assert_same(logits(helpers.load(tmp_path / family)), wanted)


# Routing bias


def test_bias_of_moonlight(bases, adapters, tmp_path):
    base, bias = bases("deepseek_v3"), {1: [0.01 * i for i in range(12)], 2: [-0.5] * 12}
    merge_adapter(base, adapters("deepseek_v3"), tmp_path / "deepseek_v3", bias=bias)
    tensors = load_file(tmp_path / "deepseek_v3" / "model.safetensors")
    assert torch.equal(tensors[MOONLIGHT_BIAS], torch.tensor(bias[1]))
    model = helpers.with_adapter(base, adapters("deepseek_v3"))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor(bias[int(name.split(".layers.")[1].split(".")[0])]))
    assert_same(logits(helpers.load(tmp_path / "deepseek_v3")), logits(model))


def test_bias_of_deepseek_v2(bases, adapters, tmp_path):
    bias = {2: [0.02 * i for i in range(12)]}
    report = merge_adapter(bases("deepseek_v2"), adapters("deepseek_v2"), tmp_path / "m", bias=bias)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(
        tensors["model.layers.2.mlp.gate.e_score_correction_bias"], torch.tensor(bias[2])
    )
    assert not tensors["model.layers.1.mlp.gate.e_score_correction_bias"].any()
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "softmax")
    assert any("noaux_tc" in note for note in report.notes)
    assert open_checkpoint(tmp_path / "m").family.name == "deepseek_v2"  # it can be served
    with pytest.raises(UnsupportedModelError, match="topk_method 'noaux_tc' is not supported"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_moe", "olmoe", "mixtral"])
def test_bias_without_a_place(bases, adapters, family, tmp_path):
    bias = {1: [0.1] * 12}
    with pytest.raises(UnsupportedModelError, match="cannot store a routing bias; leave it out"):
        merge_adapter(bases(family), adapters(family), tmp_path / "m", bias=bias)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_a_merged_bias_is_verified(bases, adapters, family, tmp_path):
    base, adapter, bias = bases(family), adapters(family), {1: [0.1] * 12, 2: [-0.2] * 12}
    merge_adapter(base, adapter, tmp_path / "kept", bias=bias)
    verify_merge(base, adapter, tmp_path / "kept", bias=bias)
    if family == "deepseek_v3":  # of an added tensor verify says nothing
        with pytest.raises(MoeFinetuneError):
            verify_merge(base, adapter, tmp_path / "kept")


# Output


def test_dry_run_changes_nothing(bases, adapters, tmp_path):
    report = merge_adapter(bases("qwen3_moe"), adapters("qwen3_moe"), tmp_path / "m", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    shown = report.text()
    assert "model.layers.*.mlp.experts.*.up_proj.weight: low-rank update, 36" in shown
    assert (
        f"{len(report.changed)} tensors changed, {len(report.copied)} copied byte for byte" in shown
    )
    real = merge_adapter(bases("qwen3_moe"), adapters("qwen3_moe"), tmp_path / "m")
    written = sum(p.stat().st_size for p in (tmp_path / "m").iterdir())
    assert report.size == real.size == written


def test_no_code_is_exported(bases, adapters, tmp_path):
    base = tmp_path / "base" / "olmoe"
    shutil.copytree(bases("olmoe"), base)
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((base / name).read_text())
        content["auto_map"] = {"AutoConfig": "configuration_x.X"}
        (base / name).write_text(json.dumps(content))
    (base / "configuration_x.py").write_text("raise SystemExit")
    (base / "LICENSE").write_text("Some Licence\n")
    merge_adapter(base, adapters("olmoe"), tmp_path / "m")
    assert not list((tmp_path / "m").glob("*.py"))
    assert (tmp_path / "m" / "LICENSE").read_text() == "Some Licence\n"
    for name in ("config.json", "tokenizer_config.json"):
        before, after = (json.loads((f / name).read_text()) for f in (base, tmp_path / "m"))
        assert before.pop("auto_map") and before == after


def test_progress_reaches_the_total(bases, adapters, tmp_path):
    seen = []
    merge_adapter(
        bases("olmoe"), adapters("olmoe"), tmp_path / "m", progress=lambda *step: seen.append(step)
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (open_checkpoint(bases("olmoe")).size,) * 2
