"""What a reader does not know is called by its name, and no remedy destroys a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MinistralConfig

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import AdapterError, CheckpointError, UnsupportedModelError
from moe_finetune.training.before.inspect_checkpoint import inspect_checkpoint, inspect_dense
from moe_finetune.upcycle.dense_parents import load_dense_config
from tests.support import tiny, tiny_families

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.experts.3.down_proj"
STACK = "model.layers.1.mlp.experts.down_proj"


def rewrite(folder, change, **config):
    file = folder / WEIGHTS
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))


def scale():
    return torch.tensor([0.25, 2.0, 0.5])


def stacked(tensors):
    """FP8 stacks of experts with their scales, in place of a layer's down projections."""
    own = {n: t for n, t in tensors.items() if not n.startswith(DOWN.rpartition(".3.")[0])}
    return own | {STACK: torch.ones(5, 7, 3).to(torch.float8_e4m3fn), f"{STACK}_scale_inv": scale()}


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 64]}}
LAYOUTS = {
    "NVFP4 of ModelOpt": (lambda t: t | {f"{DOWN}.input_scale": scale()}, {}, "NVFP4"),
    "ModelOpt's KV scales": (lambda t: t | {f"{DOWN}.k_scale": scale()}, {}, "ModelOpt"),
    "stacked FP8, declared": (stacked, FP8, "fp8 in stacks of experts"),
    "stacked FP8": (stacked, {}, "fp8 in stacks of experts"),
    "block FP8, undeclared": (lambda t: t | {f"{DOWN}.weight_scale_inv": scale()}, {}, "fp8"),
    "MLX floats": (
        lambda t: {n.replace(".experts.3.", ".switch_mlp."): v for n, v in t.items()},
        {},
        "MLX",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unknown_layout_is_called_by_its_name(layout, tmp_path):
    change, config, name = LAYOUTS[layout]
    tiny.model("qwen3_moe").save_pretrained(tmp_path)
    if layout.startswith("NVFP4"):
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    rewrite(tmp_path, change, **config)
    with pytest.raises(UnsupportedModelError, match="cannot be read; use an unquantized") as caught:
        open_checkpoint(tmp_path, stored=True)
    assert name in str(caught.value)
    assert "different checkpoints" not in str(caught.value)


def sharded(folder):
    tiny.model("qwen3_moe").save_pretrained(folder, max_shard_size="900KB")
    return sorted(folder.glob("*.safetensors"))


def test_an_entry_too_many_in_the_index_is_named(tmp_path):
    first, *_ = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["mtp.fc.weight"] = first.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'mtp.fc.weight'.*remove it from weight_map"):
        open_checkpoint(tmp_path)
    del index["weight_map"]["mtp.fc.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    open_checkpoint(tmp_path)  # the remedy helps


def test_a_tensor_in_two_shards_costs_no_file(tmp_path):
    first, second, *_ = sharded(tmp_path)
    tensors = load_file(second)
    name = next(iter(load_file(first)))
    save_file(tensors | {name: torch.ones(2, 3)}, second, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"of which {INDEX} names {first.name}") as caught:
        open_checkpoint(tmp_path)
    assert "Do not remove a file" in str(caught.value)
    save_file(tensors, second, metadata={"format": "pt"})
    open_checkpoint(tmp_path)  # written again without this tensor


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "_checkpoint_wrapped_module.", "base_model.model."]
)
def test_a_wrapper_in_an_adapter_s_keys_is_named(prefix, tmp_path):
    from tests.support.tiny_adapter import adapted

    base = tmp_path / "base"
    tiny.model("qwen3_moe").save_pretrained(base)
    adapted(tiny.model("qwen3_moe")).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    head = "base_model.model."
    tensors = {head + prefix + n.removeprefix(head): t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=f"'{prefix[:-1]}' of a wrapper.*rename"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")


def test_two_counts_of_experts_are_named(tmp_path):
    tiny_families.model("glm_moe_dsa").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t, num_experts=6)
    with pytest.raises(CheckpointError, match="n_routed_experts 10 and num_experts 6"):
        open_checkpoint(tmp_path)


def test_a_head_of_its_own_under_a_tied_config_is_counted(tmp_path):
    tiny.model("qwen3_moe").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t, tie_word_embeddings=True)
    model = load_model(tmp_path)
    found = inspect_checkpoint(str(tmp_path))
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.own_head and "head           of its own" in found.text()
    embedding = "model.embed_tokens.weight"
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t[embedding].clone()})
    assert found.parameters - inspect_checkpoint(str(tmp_path)).parameters == (
        model.lm_head.weight.numel()
    )


@pytest.mark.parametrize(("family", "count"), [("qwen3_5_moe", 1), ("exaone_moe", 2)])
def test_shared_experts_are_counted_by_the_class_s_own_key(family, count, tmp_path):
    tiny_families.model(family).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings.get("text_config", settings).pop("n_shared_experts")  # a key of other classes
    file.write_text(json.dumps(settings))
    assert inspect_checkpoint(str(tmp_path)).shared_experts == count


def test_an_author_s_attention_kernel_is_no_code(tmp_path):
    tiny.model("qwen3_moe").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t, _attn_implementation="flash_attention_2")
    assert load_model(tmp_path).config._attn_implementation in ("sdpa", "eager")


def test_a_composite_is_suggested_for_its_short_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax_m3", "experts": 3}))
    with pytest.raises(UnsupportedModelError, match="did you mean 'minimax_m3_vl'"):
        open_checkpoint(tmp_path)


def test_the_class_that_opens_a_dense_parent_counts(tmp_path):
    config = MinistralConfig(
        vocab_size=90, hidden_size=48, intermediate_size=72, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    settings = json.loads(config.to_json_string()) | {"model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="'ministral' cannot become a MoE"):
        load_dense_config(tmp_path)
    from transformers import MinistralForCausalLM

    MinistralForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "upcycle" not in inspect_dense(str(tmp_path)).text()
