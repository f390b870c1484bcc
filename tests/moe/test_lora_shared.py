"""``lora.shared_outer``: values and gradients of a slow loop over experts; saved, clipped."""

import math
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call

from moe_finetune.checkpoint.adapter_files import read_adapter, write_metadata
from moe_finetune.checkpoint.forms import FORMS
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.checkpoint.write_adapter import convert_adapter
from moe_finetune.errors import AdapterError, RecipeError
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.experts.lora_shared import SharedOuterLora, with_repeated
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training import refuse_launch
from moe_finetune.training.run.train import continue_adapter
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights
from moe_finetune.training.save_and_resume.save_trained import describe_adapter, write_adapter
from tests.support import tiny_families
from tests.support.tiny_adapter import random_factors

RANK, ALPHA = 3, 7.5
FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h", "qwen3_5_moe_text")


def section(**options):
    defaults = {"rank": RANK, "alpha": ALPHA, "targets": ["attention", "experts"]}
    return LoraSection(**defaults | {"shared_outer": True} | options)


def shared_model(name, **options):
    model = add_lora(tiny_families.model(name), section(**options), "frozen")
    torch.manual_seed(5)
    random_factors(model, 0.1)
    return model.train()


def batch():
    ids = torch.randint(4, 200, (2, 13), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def by_a_loop(name, model, use_rslora):
    """Loss and gradients of a plain model whose every expert's matrix is W + s B A."""
    scale = ALPHA / (math.sqrt(RANK) if use_rslora else RANK)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()
              if "lora_" in n}  # fmt: skip
    plain = tiny_families.model(name).train()
    changed = {}
    for path, module in model.named_modules():
        key = path.removeprefix("base_model.model.").replace(".base_layer", "")
        a, b = (leaves.get(f"{path}.lora_{side}.default.weight") for side in "AB")
        if a is None:
            continue
        if not isinstance(module, SharedOuterLora):
            weight = plain.get_parameter(f"{key}.weight")
            changed[f"{key}.weight"] = weight + scale * b @ a
            continue
        full = f"{key}.{module.parameter_name}"
        stack, experts = plain.get_parameter(full), module.num_experts
        matrices = []
        for expert in range(experts):
            if module.shared == "A":
                assert a.shape[0] == RANK
                product = b[:, expert::experts] @ a
            else:
                assert b.shape[1] == RANK
                product = b @ a[expert * RANK : (expert + 1) * RANK]
            turned = product.T if product.shape != stack[expert].shape else product
            matrices.append(stack[expert] + scale * turned)
        changed[full] = torch.stack(matrices)
    loss = functional_call(plain, changed, kwargs=batch()).loss
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("way", ["loop", "grouped", "peft", "checkpointed", "rslora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_a_slow_loop(name, way):
    model = shared_model(name, use_rslora=way == "rslora")
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    wanted, gradients = by_a_loop(name, model, way == "rslora")
    recorded = Recorder(model, kernel="grouped" if way == "grouped" else "loop")
    with nullcontext() if way == "peft" else recorded:
        loss = model(**batch()).loss
        loss.backward()  # a checkpointed layer runs again as it was recorded
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-5, atol=0)
    compared = 0
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            expected = gradients[path]
            bound = 2e-4 * float(expected.norm())
            assert float((parameter.grad - expected).norm()) <= bound, path
            compared += ".experts." in path and bool(expected.any())
    assert compared == 4 * sum(isinstance(m, SharedOuterLora) for m in model.modules()) // 2


def test_a_shared_factor_is_one_parameter():
    """Counted, clipped and given moments once."""
    model, whole = (
        shared_model("qwen3_moe"),
        add_lora(tiny_families.model("qwen3_moe"), section(shared_outer=False), "frozen"),
    )
    ours, full = (lora_coverage(m).groups["routed experts"] for m in (model, whole))
    experts, hidden, width = tiny_families.EXPERTS, tiny_families.HIDDEN, tiny_families.WIDTH
    layers = tiny_families.LAYERS
    assert full.trained_parameters == layers * experts * RANK * (2 * hidden + 3 * width)
    shared = experts * 3 * width + 2 * hidden
    assert ours.trained_parameters == layers * RANK * shared
    assert ours.reached_parameters == full.reached_parameters
    with Recorder(model):
        model(**batch()).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    total = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1e9)
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_saved_as_an_ordinary_adapter_and_continued(name, tmp_path):
    base = tmp_path / "base"
    tiny_families.model(name).save_pretrained(base)
    model = shared_model(name)
    weights, config = trained_weights(model), model.peft_config["default"]
    for folder in ("state", "adapter"):
        (tmp_path / folder).mkdir()
    write_adapter(config, weights, tmp_path / "state")
    describe_adapter(model, tmp_path / "state", 0.0, None)
    write_adapter(config, with_repeated(model, weights), tmp_path / "adapter")
    write_metadata(tmp_path / "adapter")

    sizes = [(tmp_path / f / "adapter_model.safetensors").stat().st_size
             for f in ("state", "adapter")]  # fmt: skip
    assert sizes[0] < 0.8 * sizes[1]
    merged = {}
    for folder in ("state", "adapter"):
        merge_adapter(base, tmp_path / folder, tmp_path / f"merged_{folder}")
        merged[folder] = load_file(tmp_path / f"merged_{folder}" / "model.safetensors")
    assert all(torch.equal(merged["state"][key], merged["adapter"][key]) for key in merged["state"])
    assert verify_merge(base, tmp_path / "adapter", tmp_path / "merged_adapter").error < 1e-4
    verify_merge(base, tmp_path / "state", tmp_path / "merged_state")

    written = convert_adapter(
        tmp_path / "adapter", base, tmp_path / "shared", FORMS["shared-outer"]
    )
    shapes = {k: i.shape for k, i in read_adapter(written).tensors.items() if ".experts." in k}
    assert any(shape[0] == 1 for shape in shapes.values())

    again = add_lora(tiny_families.model(name), section(rank=5, alpha=5.0), "frozen")
    continue_adapter(again, tmp_path / "adapter", open_checkpoint(base))
    with torch.no_grad():
        found, wanted = (m.eval()(**batch()).logits for m in (again, model))
    assert float((found - wanted).norm()) < 1e-5 * float(wanted.norm())


def test_factors_that_differ_are_not_continued_in_the_shared_form(tmp_path):
    base = tmp_path / "base"
    tiny_families.model("qwen3_moe").save_pretrained(base)
    model = add_lora(tiny_families.model("qwen3_moe"), section(shared_outer=False), "frozen")
    random_factors(model, 0.1)
    (tmp_path / "adapter").mkdir()
    write_adapter(model.peft_config["default"], trained_weights(model), tmp_path / "adapter")
    again = add_lora(tiny_families.model("qwen3_moe"), section(), "frozen")
    with pytest.raises(AdapterError, match=r"differs between experts, and lora\.shared_outer"):
        continue_adapter(again, tmp_path / "adapter", open_checkpoint(base))


@pytest.mark.parametrize("options", [{"targets": ["attention"]}, {"experts": "chosen.json"}])
def test_what_it_cannot_do_is_refused_before_the_start(options):
    with pytest.raises(ValueError, match="shared_outer shares the factors of all experts"):
        section(**options)


@pytest.mark.parametrize("setting", ["parallel.experts: 2", "FSDP", "model.offload: experts"])
def test_divided_experts_are_refused(setting, monkeypatch):
    recipe = Recipe.model_validate(
        {
            "model": {"path": "base", "offload": "experts" if "offload" in setting else "none"},
            "data": {"train": "x.jsonl"},
            "lora": {"rank": 4, "shared_outer": True},
            "parallel": {"experts": 2 if "parallel" in setting else 1},
        }
    )
    monkeypatch.setattr(refuse_launch, "launched_by", lambda name: name == setting)
    with pytest.raises(RecipeError, match=f"lora.shared_outer: is not supported with {setting}"):
        refuse_launch.check_launch(recipe)
