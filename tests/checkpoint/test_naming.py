"""Files that call tensors otherwise than their class saves them: opened, merged under those names.

transformers loads each of them; the merge is compared with base + adapter there.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import class_of
from moe_finetune.models.config_and_tokenizer import load_config
from tests.checkpoint.golden import check_changed
from tests.quantization.models import check_quantized
from tests.support import tiny
from tests.support import tiny_families as families
from tests.support.tiny_adapter import adapted

WEIGHTS = "model.safetensors"


def with_vision_prefix(tensors):
    return {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }


def stacks_with_vision_prefix(tensors):
    del tensors
    return with_vision_prefix(as_loaded(families.model("qwen3_5_moe_text")))


def bare(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def as_loaded(model):
    """The loaded model's own names, a stack of experts a tensor."""
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def ids_BS():
    return torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))


def loaded(folder):
    """By transformers alone, without the toolkit."""
    return class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()


def write(family, tensors_of, folder):
    """The family's tiny model with renamed tensors; ``tensors_of`` takes the saved ones."""
    model = families.model(family)
    model.save_pretrained(folder)
    saved = load_file(folder / WEIGHTS)
    renamed = as_loaded(model) if tensors_of is as_loaded else tensors_of(saved)
    assert renamed.keys() != saved.keys()
    save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    return model, renamed


CASES = [
    ("qwen3_5_moe_text", with_vision_prefix),
    ("qwen3_5_moe_text", stacks_with_vision_prefix),
    ("qwen4_exp_text", with_vision_prefix),
    *((name, bare) for name in ("deepseek_v4", "glm4_moe", "qwen3_next")),
    *(
        (name, as_loaded)
        for name in (
            "deepseek_v4",
            "exaone_moe",
            "glm4_moe",
            "granitemoe",
            "hy_v3",
            "jamba",
            "kimi_linear",
            "lfm2_moe",
            "minimax_m2",
            "nemotron_h",
            "phimoe",
            "qwen3_next",
            "inkling_mm_model",
            "aria",
        )
    ),
]


@pytest.mark.parametrize(("family", "tensors_of"), CASES)
def test_the_merge_writes_the_names_that_it_found(family, tensors_of, tmp_path):
    base, out = tmp_path / "base", tmp_path / "merged"
    model, before = write(family, tensors_of, base)
    opened = open_checkpoint(base)
    layers = FAMILIES[family].places(model.config).moe_layers
    assert opened.experts == dict.fromkeys(layers, families.EXPERTS) and not opened.untrained
    assert opened.names.loaded.keys() == before.keys()
    stock = loaded(base).state_dict()
    assert all(torch.equal(tensor, stock[name]) for name, tensor in model.state_dict().items())
    check_quantized(base, stock)

    peft = adapted(model, "lora")
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(base, tmp_path / "adapter", out)
    with torch.no_grad():
        wanted, found = peft(ids_BS()).logits, loaded(out)(ids_BS()).logits
    assert torch.allclose(wanted, found, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    check_changed(f"{family} {tensors_of.__name__}", base, out)
    after = load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_text_model_of_the_community(tmp_path):
    """Qwen3.5's language model cut out of the one with vision, in half precision."""
    base = tmp_path / "base"
    _, before = write("qwen3_5_moe_text", with_vision_prefix, base)
    halves = {name: tensor.half() for name, tensor in before.items()}
    save_file(halves, base / WEIGHTS, metadata={"format": "pt"})
    named = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "dtype": "float16"}
    change_config(base, **named)
    peft = adapted(load_model(base, dtype="float32"), "full")
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    report = verify_merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert report.layers
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert {key: written[key] for key in named} == named
    after = load_file(tmp_path / "merged" / WEIGHTS)
    assert after.keys() == halves.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.float16}


def test_kimi_k2_is_read_by_deepseek_v3_s_class(tmp_path):
    base = tmp_path / "base"
    model = tiny.model("deepseek_v3")
    model.save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    change_config(base, model_type="kimi_k2")
    with torch.no_grad():
        wanted, found = model(ids_BS()).logits, load_model(base)(ids_BS()).logits
    assert torch.equal(wanted, found)
    adapted(model, "full").save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert verify_merge(base, tmp_path / "adapter", tmp_path / "merged").layers
    convert_checkpoint(base, tmp_path / "converted")
    types = [
        json.loads((tmp_path / name / "config.json").read_text())["model_type"]
        for name in ("merged", "converted")
    ]
    assert types == ["kimi_k2", "deepseek_v3"]


def test_names_that_no_loader_of_the_type_knows_are_shown(tmp_path):
    model = tiny.model("qwen3_moe")
    model.save_pretrained(tmp_path)
    renamed = with_vision_prefix(load_file(tmp_path / WEIGHTS))
    save_file(renamed, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"did you mean 'model.language_model.embed_"):
        open_checkpoint(tmp_path)


def test_an_index_names_all_files_of_fewer_than_their_names_say(tmp_path):
    """MiniMax-M2's last files, of its MTP modules, are not published."""
    tiny.model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="900KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name in sorted(set(index["weight_map"].values())):
        longer = name.partition("-of-")[0] + "-of-00130.safetensors"
        (tmp_path / name).rename(tmp_path / longer)
        index["weight_map"] = {
            key: longer if value == name else value for key, value in index["weight_map"].items()
        }
    file.write_text(json.dumps(index))
    open_checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"of-00130.safetensors is missing"):
        open_checkpoint(tmp_path)


def test_deepseek_ocr_2_for_its_authors_code_is_refused_with_what_to_take(tmp_path):
    config = {"model_type": "deepseek_vl_v2", "language_config": {"model_type": "deepseek_v2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError,
        match=r"json needs remote code, which is never run; for .* deepseek_ocr2",
    ):
        load_config(tmp_path)


def test_sizes_that_are_published_as_a_list_or_null(tmp_path):
    """Hunyuan-A13B writes one number a layer, dots.llm1 null, by which its class would divide."""
    for family, changes in {
        "hunyuan_v1_moe": {
            "moe_topk": [families.TOP_K] * families.LAYERS,
            "moe_intermediate_size": [families.WIDTH] * families.LAYERS,
        },
        "dots1": {"n_group": None, "topk_group": None},
    }.items():
        folder = tmp_path / family
        model = families.model(family, **({"n_group": 1} if family == "dots1" else {}))
        model.save_pretrained(folder)
        change_config(folder, **changes)
        assert open_checkpoint(folder).family.top_k(load_config(folder)) == families.TOP_K
        with torch.no_grad():
            wanted, found = model(ids_BS()).logits, load_model(folder)(ids_BS()).logits
        assert torch.equal(wanted, found)
    change_config(tmp_path / "hunyuan_v1_moe", moe_topk=[1, 2, 3, 3])
    with pytest.raises(UnsupportedModelError, match="moe_topk differs by layer"):
        load_config(tmp_path / "hunyuan_v1_moe")
