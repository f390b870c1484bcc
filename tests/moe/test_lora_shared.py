"""``lora.shared_outer``: values and gradients of a slow loop over experts; saved, clipped."""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.func import functional_call

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.files import read_adapter, write_metadata
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.lora.targets import add_lora
from moe_finetune.models import FAMILIES, OURS
from moe_finetune.moe.experts.lora_on_chosen import for_all_experts
from moe_finetune.moe.experts.lora_shared import SharedOuterLora
from moe_finetune.moe.large.offload import offload_experts
from moe_finetune.moe.large.quantized_weights import quantize_model
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.quantization.weight import quantized
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.run.train import continue_adapter
from moe_finetune.training.save_and_resume.gathered_weights import live_weights, trained_weights
from moe_finetune.training.save_and_resume.save_trained import describe_adapter, write_adapter
from moe_finetune.training.specialization import Specialization
from tests.support import tiny, tiny_families
from tests.support.host_transfers import HostTransfers
from tests.support.maker_formulas import TINY
from tests.support.tiny_adapter import random_factors

RANK, ALPHA = 3, 7.5
NAMES = ("qwen3_moe", "gpt_oss", "nemotron_h", "qwen3_5_moe_text")


def places(name):
    return FAMILIES[name].places(tiny_families.config(name))


def section(**options):
    defaults = {"rank": RANK, "alpha": ALPHA, "targets": ["attention", "experts"]}
    return LoraSection(**defaults | {"shared_outer": True} | options)


def shared_model(name, quantized=False, **options):
    base = tiny_families.model(name)
    if quantized:
        quantize_model(base)
    model = add_lora(base, section(**options), "frozen")
    torch.manual_seed(5)
    random_factors(model, 0.1)
    return model.train()


def batch():
    ids = torch.randint(4, 200, (2, 13), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def packed():
    """One row of three sequences, and these sequences, each with its share of the labels."""
    ids = batch()["input_ids"].view(1, -1)
    labels, positions, each, count = ids.clone(), [], [], ids.numel() - 3
    for sequence in ids.split((7, 14, 5), 1):
        length = sequence.numel()
        labels[0, sum(map(len, positions))] = -100  # the sequence before does not predict it
        positions.append(torch.arange(length))
        each.append(({"input_ids": sequence, "labels": sequence}, (length - 1) / count))
    row = {"input_ids": ids, "labels": labels, "position_ids": torch.cat(positions)[None]}
    return row, each


def by_a_loop(name, model, use_rslora, batches):
    """Loss and gradients of a plain model whose every expert's matrix is W + s B A."""
    scale = ALPHA / (math.sqrt(RANK) if use_rslora else RANK)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()
              if "lora_" in n}  # fmt: skip
    plain = tiny_families.model(name).train()
    for path, parameter in model.named_parameters():
        if quantized(parameter):
            key = path.removeprefix("base_model.model.").replace(".base_layer", "")
            plain.get_parameter(key).data.copy_(parameter.dequantize())
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
        stack = plain.get_parameter(full)
        chosen = list(getattr(module, "chosen", range(len(stack))))
        matrices = []
        for expert in range(len(stack)):
            if expert not in chosen:
                matrices.append(stack[expert])
                continue
            slot = chosen.index(expert)
            if module.shared == "A":
                assert a.shape[0] == RANK
                product = b[:, slot :: len(chosen)] @ a
            else:
                assert b.shape[1] == RANK
                product = b @ a[slot * RANK : (slot + 1) * RANK]
            turned = product.T if product.shape != stack[expert].shape else product
            matrices.append(stack[expert] + scale * turned)
        changed[full] = torch.stack(matrices)
    loss = sum(share * functional_call(plain, changed, kwargs=one).loss for one, share in batches)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


WAYS = (
    *("loop", "grouped", "peft", "checkpointed", "rslora", "packed", "nf4", "nf4 grouped"),
    *("offloaded", "chosen", "chosen in peft"),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_a_slow_loop(name, way, tmp_path):
    options = {"use_rslora": way == "rslora", "quantized": "nf4" in way}
    if "chosen" in way:
        options["experts"] = choice(name, tmp_path / "chosen.json")
    model = shared_model(name, **options)
    if way == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    inputs, parts = packed() if way == "packed" else (batch(), [(batch(), 1.0)])
    wanted, gradients = by_a_loop(name, model, way == "rslora", parts)
    if way == "offloaded":
        offload_experts(model, HostTransfers())
    recorded = Recorder(model, kernel="grouped" if "grouped" in way else "loop")
    with nullcontext() if "peft" in way else recorded:
        loss = model(**inputs).loss
        loss.backward()  # a checkpointed layer runs again as it was recorded
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-5, atol=0)
    compared = 0
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            expected = gradients[path]
            bound = 2e-4 * float(expected.norm())
            assert float((parameter.grad - expected).norm()) <= bound, path
            compared += ".experts." in path and bool(expected.any())
    wrappers = [m for m in model.modules() if isinstance(m, SharedOuterLora)]
    assert compared == 4 * len(wrappers) // 2 > 0


CHOSEN = (1, 7, 4)


def choice(name, file):
    """Three experts of the first and last MoE layer; the layers between have no factors."""
    where = places(name)
    layers = {where.moe_layers[0]: list(CHOSEN), where.moe_layers[-1]: list(CHOSEN[:2])}
    ExpertSelection(layers, num_experts=where.num_experts).write(file)
    return str(file)


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
    write_adapter(config, for_all_experts(model, weights, []), tmp_path / "adapter")
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


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_training_state_that_lacks_a_factor_is_refused_with_its_key(side, tmp_path):
    base = tmp_path / "base"
    tiny_families.model("qwen3_moe").save_pretrained(base)
    model, state = shared_model("qwen3_moe"), tmp_path / "state"
    state.mkdir()
    weights = trained_weights(model)
    key = min(key for key in weights if f"experts.base_layer.lora_{side}" in key)
    write_adapter(model.peft_config["default"], weights, state)
    describe_adapter(model, state, 0.0, None)
    check_adapter(state, open_checkpoint(base))
    for changed in ({}, {key: weights[key][:, :-1].contiguous()}, {key: weights[key][:-1]}):
        kept = {name: tensor for name, tensor in weights.items() if name != key}
        write_adapter(model.peft_config["default"], kept | changed, state)
        with pytest.raises(AdapterError, match=re.escape(key.removeprefix("base_model.model."))):
            check_adapter(state, open_checkpoint(base))
    for value in (True, {"layers": ["C", 3]}, {"layers": ["A", 0]}):
        write_metadata(state, shared_outer=value)
        with pytest.raises(AdapterError, match="'shared_outer' must map modules"):
            read_adapter(state)


@pytest.mark.parametrize("form", ["peft", "vllm", "stacked", "shared-outer"])
def test_a_training_state_is_written_in_a_form_that_is_read(form, tmp_path):
    base, state = tmp_path / "base", tmp_path / "state"
    tiny_families.model("qwen3_moe").save_pretrained(base)
    model = shared_model("qwen3_moe")
    state.mkdir()
    write_adapter(model.peft_config["default"], trained_weights(model), state)
    describe_adapter(model, state, 0.0, None)
    merge_adapter(base, state, tmp_path / "wanted")
    convert_adapter(state, base, tmp_path / "written", FORMS[form])
    merge_adapter(base, tmp_path / "written", tmp_path / "merged")
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [family.name for family in OURS if family.name != "deepseek_moe"])
def test_a_training_state_of_every_family_is_read(name, tmp_path):
    """Whatever its experts are called, and in whichever order the class declares its stacks."""
    base, state = tmp_path / "base", tmp_path / "state"
    plain = (tiny if name in TINY else tiny_families).model(name)
    plain.save_pretrained(base)
    model = add_lora(plain, section(targets=["experts"]), "frozen")
    random_factors(model, 0.1)
    state.mkdir()
    weights = trained_weights(model)
    write_adapter(model.peft_config["default"], weights, state)
    describe_adapter(model, state, 0.0, None)
    adapter, whole = read_adapter(state), for_all_experts(model, weights, [])
    check_adapter(state, open_checkpoint(base))
    assert {key.removeprefix("base_model.model.") for key in whole} == adapter.tensors.keys()
    for key, info in adapter.tensors.items():
        assert torch.equal(read_tensor(info), whole[f"base_model.model.{key}"]), key


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


def test_chosen_experts_are_saved_in_both_forms(tmp_path):
    """Experts that were not chosen have the shared factor and zeros, and compute as the base."""
    base, name = tmp_path / "base", "qwen3_moe"
    tiny_families.model(name).save_pretrained(base)
    model = shared_model(name, experts=choice(name, tmp_path / "chosen.json"))
    weights, config = trained_weights(model), model.peft_config["default"]
    for folder in ("state", "adapter"):
        (tmp_path / folder).mkdir()
    write_adapter(config, weights, tmp_path / "state")
    describe_adapter(model, tmp_path / "state", 0.0, None)
    whole = for_all_experts(model, weights, places(name).moe_layers)
    write_adapter(config, whole, tmp_path / "adapter")
    write_metadata(tmp_path / "adapter")
    convert_adapter(tmp_path / "adapter", base, tmp_path / "shared", FORMS["shared-outer"])
    plain = load_file(base / "model.safetensors")
    first = None
    for folder in ("state", "adapter", "shared"):
        merge_adapter(base, tmp_path / folder, tmp_path / f"merged_{folder}")
        verify_merge(base, tmp_path / folder, tmp_path / f"merged_{folder}")
        merged = load_file(tmp_path / f"merged_{folder}" / "model.safetensors")
        first = merged if first is None else first
        assert all(torch.equal(merged[key], first[key]) for key in first)
    changed = {
        key for key in plain if ".experts." in key and not torch.equal(plain[key], first[key])
    }
    where = places(name).moe_layers
    expected = {(where[0], e) for e in CHOSEN} | {(where[-1], e) for e in CHOSEN[:2]}
    assert {(int(k.split(".")[2]), int(k.split(".")[5])) for k in changed} == expected
    stock = PeftModel.from_pretrained(
        tiny_families.model(name).from_pretrained(base), tmp_path / "adapter"
    )
    with torch.no_grad():
        found, wanted = (m.eval()(**batch()).logits for m in (stock, model))
    assert float((found - wanted).norm()) < 1e-5 * float(wanted.norm())


def test_an_expert_that_no_token_chose_adds_nothing():
    """Its own factor has no gradient, and no other gradient changes with it."""
    model, where = shared_model("qwen3_moe"), places("qwen3_moe")
    used = {layer: set() for layer in where.moe_layers}
    two = {key: ids[:1, :2] for key, ids in batch().items()}  # tokens

    def gradients():
        model.zero_grad()
        with Recorder(
            model, observers=[lambda r, _: used[r.layer].update(r.index_TK.flatten().tolist())]
        ):
            model(**two).loss.backward()
        factors = {
            n: p for n, p in model.named_parameters() if ".experts." in n and p.requires_grad
        }
        return {name: parameter.grad.clone() for name, parameter in factors.items()}

    def of_idle(tensors):
        """Each layer's A of down, which every expert has, of the experts without tokens."""
        for layer, seen in used.items():
            idle = [expert for expert in range(where.num_experts) if expert not in seen]
            key = next(n for n in tensors if f".{layer}.mlp.experts.lora_A" in n)
            yield tensors[key].view(where.num_experts, RANK, -1), idle

    before = gradients()
    with torch.no_grad():
        for a_ErD, idle in of_idle(dict(model.named_parameters())):
            assert idle
            a_ErD[idle] *= 50
    after = gradients()
    assert all(gradient.any() and torch.equal(gradient, after[n]) for n, gradient in before.items())
    assert not any(gradient[idle].any() for gradient, idle in of_idle(before))


def test_losses_that_read_the_experts_projections_see_the_shared_factor():
    """ERC's value and gradients, with each expert's own copy of the factor as the reference."""
    shared = shared_model("qwen3_moe")
    copied = add_lora(tiny_families.model("qwen3_moe"), section(shared_outer=False), "frozen")
    weights = for_all_experts(shared, trained_weights(shared), [])
    with torch.no_grad():
        for key, tensor in live_weights(copied).items():
            tensor.copy_(weights[key])
    totals, experts = [], places("qwen3_moe").num_experts
    terms = {"erc": {"weight": 5.0}, "orthogonality": {"weight": 2.0}}
    method = {"terms": terms, "strength": {"first": False}}
    for model in (shared, copied.train()):
        with Specialization(model, method):
            torch.manual_seed(4)
            model(**batch()).loss.backward()
        totals.append(
            {n: p.grad for n, p in model.named_parameters() if ".experts." in n and p.requires_grad}
        )
    for key, gradient in totals[0].items():
        expected = totals[1][key]
        if gradient.shape != expected.shape:
            side = key.partition("lora_")[2][0]
            expected = (
                expected.view(experts, RANK, -1).sum(0)
                if side == "A"
                else expected.unflatten(1, (RANK, experts)).sum(2)
            )
        assert float((gradient - expected).norm()) <= 1e-4 * float(expected.norm()), key


def test_what_it_cannot_do_is_refused_before_the_start():
    with pytest.raises(ValueError, match="needs 'experts' among targets"):
        section(targets=["attention"])
