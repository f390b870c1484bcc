"""Verification accepts what was merged and sees every kind of damage."""

import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint import verify, verify_logits
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.checkpoint.verify_logits import compare_logits
from moe_finetune.errors import CheckpointError, NumericsError
from moe_finetune.io.terminal import terminal
from moe_finetune.models.small_configs import first_layers
from tests.checkpoint import helpers
from tests.checkpoint.helpers import select
from tests.support import names_on_disk, tiny, tiny_families
from tests.support.tiny_adapter import LORA, add_lora

WEIGHTS = "model.safetensors"


def damage(folder, name, amount=0.05):
    tensors = load_file(folder / WEIGHTS)
    tensors[name].view(-1)[3] += amount
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.fixture(params=["whole", "first layers"])
def layers(request, monkeypatch):
    """Whether logits are those of the whole model or of as many layers as a large one has room."""
    if request.param == "first layers":
        monkeypatch.setattr(
            verify,
            "layers_to_run",
            lambda base: first_layers(base.model_config, min(base.experts)),
        )
    return request.param


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_accepts_a_merge(bases, adapters, family, layers, tmp_path):
    base, adapter = bases(family), adapters(family)
    merged = merge_adapter(base, adapter, tmp_path / family).output
    report = verify_merge(base, adapter, merged)
    assert report.error < 1e-5 < 1e-2 < report.moved and not report.note
    assert (report.layers == report.total_layers) == (layers == "whole") or family == "mixtral"
    opened = open_checkpoint(base)
    count = opened.places.num_experts
    assert report.tensors >= 2 * count * len(opened.experts)
    assert "logits" in report.text() and f"{report.tensors} changed tensors" in report.text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("wrong", ["dropped", "the next one's"])
def test_sees_one_wrong_expert_of_many(dtype, wrong, tmp_path):
    """Any one of ten, in any layer, at its own place in the files."""
    model = tiny_families.model("qwen3_moe").to(dtype)
    base = tmp_path / "qwen3_moe"
    model.save_pretrained(base)
    adapter = helpers.adapter(base, tmp_path / "adapter", seed=4)
    right = merge_adapter(base, adapter, tmp_path / "right").output
    verify_merge(base, adapter, right)
    before, after = (load_file(at / WEIGHTS) for at in (base, right))
    experts = [name for name in after if ".experts." in name and name.endswith("weight")]
    layers = {name.partition(".mlp.")[0] for name in experts}
    assert len(layers) == 4 and len(experts) == 4 * 10 * 3
    for layer in sorted(layers):
        for expert in (0, 6, 9):
            tensors = dict(after)
            for name in (n for n in experts if n.startswith(f"{layer}.")):
                if f".experts.{expert}." in name:
                    other = name.replace(f".experts.{expert}.", f".experts.{(expert + 1) % 10}.")
                    change = after[other].float() - before[other].float()
                    new = before[name].float() + change if wrong != "dropped" else before[name]
                    tensors[name] = new.to(dtype)
            folder = tmp_path / f"{layer}-{expert}"
            shutil.copytree(right, folder)
            save_file(tensors, folder / WEIGHTS, {"format": "pt"})
            with pytest.raises(NumericsError, match=rf"experts\.{expert}\."):
                verify_merge(base, adapter, folder)


def test_sees_a_wrong_merge(bases, adapters, tmp_path):
    """The merge of another adapter."""
    base = bases("deepseek_v2")
    other = helpers.adapter(base, tmp_path / "other", seed=9)
    merged = merge_adapter(base, other, tmp_path / "deepseek_v2").output
    with pytest.raises(NumericsError, match=r"is not base \+ adapter"):
        verify_merge(base, adapters("deepseek_v2"), merged)


def test_sees_too_many_elements_that_are_off_by_a_rounding_step(tmp_path):
    """Either neighbour of a sum halfway between two is right for one element, not for all."""
    name, factor = "model.layers.1.self_attn.q_proj", "base_model.model.{}.lora_{}.weight"
    model = tiny_families.model("qwen3_moe").to(torch.bfloat16)
    model.get_submodule(name).weight.data.zero_()  # so that sums are small beside the largest
    base = tmp_path / "qwen3_moe"
    model.save_pretrained(base)
    adapter = helpers.adapter(base, tmp_path / "adapter", seed=4)
    merged = merge_adapter(base, adapter, tmp_path / "merged").output
    factors = load_file(adapter / "adapter_model.safetensors")
    b, a = (factors[factor.format(name, part)] for part in "BA")
    exact = 3.0 * (b @ a)  # alpha 12, rank 4
    slack = verify.SLACK * (exact.abs() + exact.abs().max())
    low, high = (exact - slack).bfloat16(), (exact + slack).bfloat16()
    tensors = load_file(merged / WEIGHTS)
    after = tensors[f"{name}.weight"]
    other = torch.where(after == low, high, low)
    where = (other != after).nonzero()
    assert len(where) > verify.OFF_BY_A_STEP * after.numel() > 2
    for count, wrong in ((2, False), (len(where), True)):
        some = tuple(where[:count].T)
        tensors[f"{name}.weight"] = after.clone().index_put(some, other[some])
        save_file(tensors, merged / WEIGHTS, {"format": "pt"})
        if not wrong:
            verify_merge(base, adapter, merged)
            continue
        with pytest.raises(NumericsError, match=r"q_proj.* is not base \+ adapter"):
            verify_merge(base, adapter, merged)


def test_sees_an_untouched_tensor_change(bases, adapters, tmp_path):
    base = bases("deepseek_v2")
    merged = merge_adapter(base, adapters("deepseek_v2"), tmp_path / "m").output
    damage(merged, "model.layers.0.mlp.up_proj.weight", 1e-4)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        verify_merge(base, adapters("deepseek_v2"), merged)


def five_steps(model, folder):
    """An adapter after five steps at a usual rate, which bfloat16 hardly resolves."""
    peft = add_lora(model.float(), LORA, "lora")
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=2e-4)
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        ids = torch.randint(4, 260, (2, 24), generator=generator)
        peft(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peft.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory):
    """family -> base, adapter after five steps, and their right merge."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = tiny_families.model(family).bfloat16()
            model.save_pretrained(folder / "base")
            five_steps(model, folder / "adapter")
            merge_adapter(folder / "base", folder / "adapter", folder / "merged")
            made[family] = folder
        return made[family]

    return get


def of_experts(name):
    return ".experts." in name or ".shared_experts" in name


def drop_experts(base, tensors):
    return {n: base[n] if of_experts(n) else t for n, t in tensors.items()}


def drop_a_layer(base, tensors):
    return {n: base[n] if ".layers.2." in n else t for n, t in tensors.items()}


def exchange_gate_and_up(base, tensors):
    """The changes of the two halves, in every layer."""
    swapped = dict(tensors)
    for name in tensors:
        if of_experts(name) and ".gate_proj." in name:
            other = name.replace(".gate_proj.", ".up_proj.")
            change, of_other = (tensors[n].float() - base[n].float() for n in (name, other))
            swapped[name] = (base[name].float() + of_other).to(base[name].dtype)
            swapped[other] = (base[other].float() + change).to(base[name].dtype)
        elif name.endswith("experts.gate_up_proj"):
            swapped[name] = base[name] + (tensors[name] - base[name]).roll(1, 1)
    return swapped


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_vl_moe"])
def test_a_small_change_in_half_precision(in_bfloat16, family):
    folder = in_bfloat16(family)
    report = verify_merge(folder / "base", folder / "adapter", folder / "merged")
    assert report.off_by_a_step <= 1e-3 * report.elements
    # What 16 bits cannot tell apart is said, not hidden.
    assert report.moved > 10 * report.error or "rounding to BF16" in report.text()


@pytest.mark.parametrize(
    ("error", "note"),
    [(0.0009, ""), (0.0013, ".*blurs the adapter: .*by 13 % of"), (0.012, ".*hides .*by 120 % of")],
)
def test_rounding_is_named_by_its_share_of_the_adapter(in_bfloat16, monkeypatch, error, note):
    """A tenth of the change was called hidden, and 13 % was written as 0.1."""
    monkeypatch.setattr(verify, "compare_logits", lambda *_: (error, 0.01))
    folder = in_bfloat16("glm4_moe")
    found = verify_merge(folder / "base", folder / "adapter", folder / "merged").note
    assert re.fullmatch(f"{note}.*float32.*" if note else "", found)


def test_a_command_shows_no_bar_of_transformers(in_bfloat16, monkeypatch, capsys):
    monkeypatch.setattr(terminal(), "capture", True)
    merged = open_checkpoint(in_bfloat16("glm4_moe") / "merged")
    capsys.readouterr()
    verify_logits.load(merged, 1)
    assert "Loading" not in capsys.readouterr().err


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_vl_moe"])
@pytest.mark.parametrize(
    "wrong", [lambda base, _: base, drop_experts, drop_a_layer, exchange_gate_and_up]
)
def test_a_wrong_merge_of_a_small_change_is_seen(in_bfloat16, family, wrong, tmp_path):
    folder = in_bfloat16(family)
    merged = shutil.copytree(folder / "merged", tmp_path / "wrong")
    before, after = (load_file(f / WEIGHTS) for f in (folder / "base", merged))
    spoiled = {name: tensor.contiguous() for name, tensor in wrong(before, after).items()}
    assert any(not torch.equal(after[name], tensor) for name, tensor in spoiled.items())
    save_file(spoiled, merged / WEIGHTS, {"format": "pt"})
    with pytest.raises(NumericsError, match=r"is not base \+ adapter: .* of .* elements differ"):
        verify_merge(folder / "base", folder / "adapter", merged)


def test_a_model_that_peft_cannot_run_has_no_logits(tmp_path):
    """PhiMoE's router returns a pair, which PEFT's module around it takes for a tensor."""
    from peft import LoraConfig, get_peft_model

    base, adapter = tmp_path / "phimoe", tmp_path / "adapter"
    model = tiny_families.model("phimoe")
    model.save_pretrained(base)
    peft = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"))
    helpers.randomize(peft, 3, 0.05)
    peft.save_pretrained(adapter)
    merged = merge_adapter(base, adapter, tmp_path / "merged").output
    report = verify_merge(base, adapter, merged)
    assert report.layers is None and "no logits: PEFT cannot run the model" in report.text()
    damage(merged, "model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(NumericsError, match=r"q_proj\.weight' is not base \+ adapter"):
        verify_merge(base, adapter, merged)


def test_chosen_experts(bases, adapters, tmp_path):
    base, full = bases("qwen3_moe"), adapters("qwen3_moe")
    small = select(full, base, {1: [9, 2, 5], 2: list(range(11))}, tmp_path / "small")
    merged = merge_adapter(base, small, tmp_path / "m").output
    assert verify_merge(base, small, merged).error < 1e-5
    with pytest.raises(NumericsError):
        verify_merge(base, full, merged)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_full_router(bases, family, tmp_path):
    base = bases(family)
    full = helpers.adapter(
        base, tmp_path / "a", target_parameters=None, modules_to_save=["gate"], seed=5
    )
    merged = merge_adapter(base, full, tmp_path / family).output
    assert verify_merge(base, full, merged).error < 1e-5
    damage(merged, names_on_disk.name(family, "router", 1))
    with pytest.raises(NumericsError, match="gate"):
        verify_merge(base, full, merged)


def test_bias_and_half_precision(bases, adapters, tmp_path):
    base, bias = bases("deepseek_v3"), {1: [0.03 * i for i in range(12)]}
    adapter = adapters("deepseek_v3")
    merged = merge_adapter(base, adapter, tmp_path / "deepseek_v3", bias=bias).output
    assert verify_merge(base, adapter, merged, bias=bias).error < 1e-5
    half = merge_adapter(base, adapter, tmp_path / "h" / "deepseek_v3", "bfloat16")
    rounded = verify_merge(base, adapter, half.output)
    assert 1e-5 < rounded.error < rounded.moved


@pytest.mark.parametrize("moved", ["none", "a layer"])
def test_an_adapter_that_adds_nothing_is_told(bases, adapters, tmp_path, moved):
    base = bases("qwen3_moe")
    adapter = shutil.copytree(adapters("qwen3_moe"), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    still = [n for n in tensors if ".lora_B" in n and (moved == "none" or ".layers.1." not in n)]
    save_file(tensors | {n: torch.zeros_like(tensors[n]) for n in still}, file)
    merged = merge_adapter(base, adapter, tmp_path / "m").output
    report = verify_merge(base, adapter, merged)
    assert f"{report.same} of them equal to the base's" in report.text()
    if moved == "none":
        assert report.same == report.tensors and report.moved == 0.0
        assert "does not move the logits" in report.text()
    else:
        assert 0 < report.same < report.tensors and report.note == ""


def test_a_model_whose_logits_are_all_zero(bases, adapters, tmp_path):
    """The relative error has nothing to refer to; equal is equal all the same."""
    base = shutil.copytree(bases("qwen3_moe"), tmp_path / "qwen3_moe")
    tensors = load_file(base / WEIGHTS)
    tensors["lm_head.weight"].zero_()
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    adapter = helpers.adapter(base, tmp_path / "adapter")
    merged = merge_adapter(base, adapter, tmp_path / "m").output
    report = verify_merge(base, adapter, merged)
    assert (report.error, report.moved) == (0.0, 0.0)
    tensors = load_file(merged / WEIGHTS)
    tensors["lm_head.weight"][5, 2] = 0.5
    wrong = shutil.copytree(merged, tmp_path / "wrong")
    save_file(tensors, wrong / WEIGHTS, {"format": "pt"})
    parts = open_adapter(adapter, open_checkpoint(base)), open_checkpoint(wrong)
    assert compare_logits(*parts, report.total_layers)[0] == math.inf
