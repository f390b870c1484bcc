"""Composites: LoRA stays in the language part, published layouts, images, and what is refused."""

import json
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import AdapterError, CheckpointError, UnsupportedModelError
from moe_finetune.models import composites
from moe_finetune.models.class_structure import class_of
from moe_finetune.models.config_and_tokenizer import load_config
from moe_finetune.moe.recorder.hooks import Recorder
from tests.checkpoint.helpers import randomize
from tests.quantization.models import check_quantized
from tests.support import names_on_disk
from tests.support import tiny_families as tiny
from tests.support.places import places
from tests.support.tiny_adapter import adapted

WEIGHTS = "model.safetensors"


def ids_BS():
    return torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))


def loaded(folder):
    return class_of(load_config(folder)).from_pretrained(folder).eval()


@pytest.mark.parametrize("router", ["lora", "full"])
@pytest.mark.parametrize("family", ["aria", "gemma4"])
def test_lora_stays_out_of_vision_modules_of_the_same_name(family, router):
    stack = f".{places(family).backbone}.layers."
    plain = [name for name, _ in tiny.model(family).named_modules()]
    elsewhere = [name for name in plain if stack not in f".{name}"]
    assert any(name.endswith("self_attn.q_proj") for name in elsewhere)
    model = adapted(tiny.model(family), router)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(stack in name for name in trained)
    assert sum("q_proj.lora_A" in name for name in trained) == tiny.LAYERS


def _transposed(tensors):
    return {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors.items()}


def _stacked(tensors):
    """An expert's matrices as the loaded model's stacks, which published files have."""
    made = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(tiny.LAYERS):
        head = f"model.language_model.layers.{layer}.mlp.experts"
        halves = {
            part: torch.stack([tensors[f"{head}.{e}.{part}.weight"] for e in range(tiny.EXPERTS)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        made[f"{head}.gate_up_proj"] = torch.cat([halves["gate_proj"], halves["up_proj"]], 1)
        made[f"{head}.down_proj"] = halves["down_proj"]
    return made


@pytest.mark.parametrize(
    ("family", "published"),
    [("qwen3_vl_moe", _transposed), ("qwen3_5_moe", _stacked), ("inkling_mm_model", dict)],
)
def test_a_published_layout(family, published, tmp_path):
    base, out = tmp_path / "base", tmp_path / "merged"
    tiny.model(family).save_pretrained(base)
    before = published(load_file(base / WEIGHTS))
    save_file(before, base / WEIGHTS, metadata={"format": "pt"})
    assert open_checkpoint(base).experts == dict.fromkeys(places(family).moe_layers, tiny.EXPERTS)
    stock = loaded(base).state_dict()
    check_quantized(base, stock)

    model = adapted(tiny.model(family), "lora")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(base, tmp_path / "adapter", out)
    with torch.no_grad():
        wanted, found = model(ids_BS()).logits, loaded(out)(ids_BS()).logits
    assert torch.allclose(wanted, found, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    after = load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    stack = names_on_disk.stack(family)
    assert {name for name in before if not name.startswith(stack)} <= same < before.keys()


def test_stacks_that_are_stored_both_ways_are_refused(tmp_path):
    tiny.model("qwen3_vl_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.experts.down_proj' is stored transp"):
        open_checkpoint(tmp_path)


def test_an_image_runs_through_the_recorder():
    """Logits with pixels are stock's, and tokens are those that the whole model was given."""
    model = tiny.model("qwen3_vl_moe")
    ids = ids_BS()[:1]
    ids[0, 3:9] = torch.tensor([392, 390, 390, 390, 390, 393])
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(2))
    inputs = {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 390).long(),
    }
    records = []
    with torch.no_grad():
        stock, blind = model(**inputs).logits, model(input_ids=ids).logits
        with Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"):
            found = model(**inputs).logits
    assert torch.equal(stock, found) and float((stock - blind).abs().max()) > 1e-3
    assert len(records) == tiny.LAYERS
    assert all(torch.equal(record.token_ids_T, ids[0]) for record in records)


def _config(tmp_path, **content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(("model_type", "reason"), composites.REFUSED.items())
def test_other_composites_are_refused_with_the_reason(model_type, reason, tmp_path):
    assert reason.isprintable()
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' cannot be trained: "):
        load_config(_config(tmp_path, model_type=model_type))


def test_other_parts_are_refused(tmp_path):
    dense = _config(tmp_path, model_type="internvl", text_config={"model_type": "qwen2"})
    with pytest.raises(
        UnsupportedModelError, match="qwen3_moe or gpt_oss, but this checkpoint's is 'qwe"
    ):
        load_config(dense)
    with pytest.raises(
        UnsupportedModelError, match="this language model only as part of 'qwen3_vl_moe'"
    ):
        load_config(_config(tmp_path, model_type="qwen3_vl_moe_text", num_hidden_layers=2))
    without = tiny.config("gemma4", enable_moe_block=False)
    without.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no layer with experts"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_vl_moe", {"num_experts": 7, "num_experts_per_tok": 1}),
        ("glm4v_moe", {"first_k_dense_replace": 3}),
        ("gemma4", {"tie_word_embeddings": True}),
    ],
    ids=["seven experts, one selected", "one MoE layer", "tied"],
)
def test_other_sizes_in_shards(family, changes, tmp_path):
    base = tmp_path / "base"
    tiny.model(family, **changes).save_pretrained(base, max_shard_size="1MB")
    assert len(list(base.glob("*.safetensors"))) > 1
    model = adapted(tiny.model(family, **changes), "lora")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    batch = {"input_ids": ids_BS(), "labels": ids_BS(), "use_cache": False}
    gradients = []
    for recorder in (nullcontext(), Recorder(model)):
        with recorder:
            model.zero_grad()
            model(**batch).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    # The gradient of a router whose one expert has weight 1 is 0: what is left is the rounding of
    # the others, less than a step of float32 of the largest.
    rounding = 1e-7 * max(float(gradient.abs().max()) for gradient in gradients[0].values())
    for name, wanted in gradients[0].items():
        difference = float((wanted - gradients[1][name]).abs().max())
        assert difference < 2e-4 * float(wanted.abs().max()) + rounding, name
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert {f.name for f in base.glob("*.safetensors")} == {
        f.name for f in (tmp_path / "merged").glob("*.safetensors")
    }
    with torch.no_grad():
        wanted, found = model(ids_BS()).logits, loaded(tmp_path / "merged")(ids_BS()).logits
    assert torch.allclose(wanted, found, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("experts", [False, True])
def test_an_adapter_of_the_text_class_is_named_and_merges_when_it_is_renamed(experts, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny.model("qwen3_5_moe").save_pretrained(base)
    text = AutoModelForCausalLM.from_pretrained(base).eval()
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None
    settings = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=stacks)
    model = get_peft_model(text, settings).eval()
    randomize(model, 3, 0.05)
    model.save_pretrained(adapter)
    with torch.no_grad():
        wanted = model(ids_BS()).logits
    with pytest.raises(AdapterError, match=r"trained on another class .* or rename the adapter's"):
        merge_adapter(base, adapter, tmp_path / "refused")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(
        {n.replace(".layers.", ".language_model.layers."): t for n, t in tensors.items()}, file
    )
    merge_adapter(base, adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        found = merged(ids_BS()).logits
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
