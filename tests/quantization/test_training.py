"""Training on quantized weights: the gradients of their values, runs, resumption, refusals."""

import json
import math
import shutil

import pytest
import torch
import yaml

from moe_finetune import Specialization, load_model, run_recipe
from moe_finetune.cli import main
from moe_finetune.errors import QuantizationError
from moe_finetune.losses import erc
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.experts import grouped_products
from moe_finetune.quantization import weight
from moe_finetune.quantization.weight import QuantizedWeight, quantized
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import load_recipe
from tests.families.cases import KINDS
from tests.quantization.models import batch, dequantized, save
from tests.support import tiny
from tests.support.places import places
from tests.support.tiny_adapter import LORA, adapted

pytestmark = pytest.mark.usefixtures("warm")  # for rehearsals of runs

NEEDS_A_FILE = {"supervised_routing"}
LEAST = 1e-6
"""Gradients below this share of the largest are rounding, and are not compared by direction."""


def every_term() -> dict:
    """All losses at once, without the noise of any, at a weight that each can be seen with."""
    options: dict = {}
    for preset in sorted(set(PRESETS) - NEEDS_A_FILE):
        for name, term in resolve_method(preset).terms.items():
            options[name] = term.model_dump() | {"weight": 0.01, "share": None}
    return {"terms": {n: {k: v for k, v in o.items() if v is not None} for n, o in options.items()}}


def gradients(model, method, kernel="auto", checkpointing=False):
    """Loss and gradients of one training step's forwards; strength is not measured."""
    model.train().zero_grad()
    method = {**method, "strength": {"first": False}}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    torch.manual_seed(7)
    with Specialization(model, method, kernel=kernel):
        loss = model(**batch()).loss
        loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_equal(wanted, found):
    assert wanted[1].keys() == found[1].keys() and any("lora_A" in name for name in wanted[1])
    assert wanted[0] == pytest.approx(found[0], rel=1e-6)
    largest = max(float(gradient.norm()) for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        difference = float((gradient - found[1][name]).norm())
        assert difference <= 1e-5 * max(float(gradient.norm()), LEAST * largest), name


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_the_dequantised_model(family, tmp_path):
    """Routers, LoRA on attention, shared and routed experts, under every loss at once."""
    save(family, tmp_path)
    method = every_term()
    if not places(family).gated:
        del method["terms"]["erc"]  # reads the gate projection
    wanted = gradients(adapted(dequantized(tmp_path)), method)
    found = gradients(adapted(load_model(tmp_path, "float32", quantization="nf4")), method)
    assert any("gate" in name or "router" in name for name in found[1])
    assert_equal(wanted, found)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("setting", [{"kernel": "grouped"}, {"checkpointing": True}])
def test_the_grouped_kernel_and_checkpointing(family, setting, tmp_path):
    save(family, tmp_path)
    method = every_term()
    wanted = gradients(adapted(dequantized(tmp_path)), method)
    model = adapted(load_model(tmp_path, "float32", quantization="nf4"))
    assert_equal(wanted, gradients(model, method, **setting))


@pytest.fixture
def dequantized_sizes(monkeypatch):
    """How many values each dequantization made."""
    sizes, original = [], weight.dequantize

    def measured(*args):
        values = original(*args)
        sizes.append(values.numel())
        return values

    monkeypatch.setattr(weight, "dequantize", measured)
    return sizes


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_experts_are_dequantised_a_few_at_a_time(
    family, per_chunk, tmp_path, monkeypatch, dequantized_sizes
):
    """The grouped kernel in chunks, the last of them shorter, has the gradients of the whole."""
    save(family, tmp_path)
    model = adapted(load_model(tmp_path, "float32", quantization="nf4"))
    method = {"terms": {"erc": {"weight": 0.1}, "orthogonality": {"weight": 0.1}}}
    whole = gradients(model, method, "grouped")
    stacks = {tuple(p.shape) for p in model.parameters() if quantized(p) and p.dim() == 3}
    largest = max(rows * columns for _, rows, columns in stacks)
    monkeypatch.setattr(grouped_products, "DEQUANTIZED_BYTES", per_chunk * largest * 4)
    # ERC reads gate rows: half of each matrix that is dequantized.
    monkeypatch.setattr(erc, "WIDENED_BYTES", per_chunk * largest * 4 // 2)
    dequantized_sizes.clear()
    chunked = gradients(model, method, "grouped")
    assert_equal(whole, chunked)
    # Attention's matrices are dequantized whole.
    matrices = max(p.numel() for p in model.parameters() if quantized(p) and p.dim() == 2)
    assert max(dequantized_sizes) <= max(matrices, per_chunk * largest)
    assert len(dequantized_sizes) > 20


def test_experts_without_tokens_are_not_dequantised(dequantized_sizes):
    values = torch.randn(9, 16, 32, generator=torch.Generator().manual_seed(4))
    packed = QuantizedWeight.of(values)
    index_TK = torch.tensor([[7, 2], [2, 4], [7, 4]])
    hidden_TH = torch.randn(3, 32, generator=torch.Generator().manual_seed(5))
    groups = grouped_products.Groups.of(index_TK, 9, grouped=True, in_chunks=True)
    for per_chunk, calls in ((2, [2 * 512, 512]), (9, [3 * 512])):
        parts = groups._chunks(groups.bounds, per_chunk)
        dequantized_sizes.clear()
        rows = [
            grouped_products.rows_times(hidden_TH[part.tokens_P], packed.mT, part) for part in parts
        ]
        assert dequantized_sizes == calls
        expected = torch.stack(
            [
                hidden_TH[t] @ packed.dequantize()[e].T
                for e in (2, 4, 7)
                for t in range(3)
                if e in index_TK[t]
            ]
        )
        assert torch.allclose(torch.cat(rows), expected, rtol=1e-5, atol=1e-5)


def test_what_the_backward_waits_for_holds_no_dequantised_expert(tmp_path):
    """ERC's reading of the gate projections and the experts' own keep packed bytes."""
    save("qwen3_moe", tmp_path)
    model = adapted(load_model(tmp_path, "float32", quantization="nf4"), router="frozen").train()
    stacks = {tuple(p.shape) for p in model.parameters() if quantized(p) and p.dim() == 3}
    experts, rows, hidden = max(stacks)
    seen: list[tuple[int, ...]] = []

    def note(tensor):
        if not quantized(tensor):
            seen.append(tuple(tensor.shape))
        return tensor

    with (
        Specialization(model, "erc"),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        model(**batch())
    assert seen and not stacks & set(seen)
    assert (experts, rows // 2, hidden) not in seen and (rows, hidden) not in seen


def test_peft_alone_computes_the_same(tmp_path):
    """Without the toolkit's forward, PEFT's wrappers read the weight and leave it as it was."""
    save("qwen3_moe", tmp_path)
    model = adapted(load_model(tmp_path, "float32", quantization="nf4")).eval()
    wanted = adapted(dequantized(tmp_path)).eval()
    inputs = batch()["input_ids"]
    with torch.no_grad():
        found = model(inputs).logits
        assert torch.allclose(found, wanted(inputs).logits, atol=1e-5)
        assert torch.equal(found, model(inputs).logits)
    assert any(quantized(parameter) for parameter in model.parameters())
    with pytest.raises(QuantizationError, match="merge it into the unquantized base"):
        model.merge_and_unload()


def test_experts_cannot_train_in_full(tmp_path):
    from peft import LoraConfig, get_peft_model

    save("qwen3_moe", tmp_path)
    model = load_model(tmp_path, "float32", quantization="nf4")
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["mlp.experts"])
    model = get_peft_model(model, config)
    with (
        pytest.raises(QuantizationError, match=r"experts.*cannot be trained; train a LoRA"),
        Specialization(model, "none"),
    ):
        pass


# -- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def recipe_file(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"text": "row {n} says {n * n}"}}\n' for n in range(24)))
    recipe = {
        "model": {"path": str(base), "dtype": "float32", "quantization": "nf4"},
        "method": {"preset": "orthogonal_variance"},
        "lora": {"rank": LORA.rank, "alpha": LORA.alpha, "dropout": 0.1},
        "data": {"train": str(data), "max_length": 32},
        "trainer": {
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "report_to": "none",
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def test_a_run_merges_into_the_unquantised_base_and_resumes_exactly(recipe_file, tmp_path, capsys):
    straight = run_recipe(load_recipe(recipe_file), tmp_path / "straight")
    assert (straight / "merged" / "model.safetensors").is_file()
    adapter = (straight / "adapter" / "adapter_model.safetensors").read_bytes()

    halves = ["export.merge=false", "trainer.max_steps=4"]
    recipe = load_recipe(recipe_file, halves)
    again = tmp_path / "again"
    run_recipe(recipe, again)
    shutil.rmtree(again / "adapter")
    shutil.rmtree(again / "checkpoints" / "checkpoint-4")
    run_recipe(recipe, again, resume=True)
    assert (again / "adapter" / "adapter_model.safetensors").read_bytes() == adapter

    assert main(["merge", str(straight), "--output", str(tmp_path / "merged"), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "verified: " in said


def test_preferences_are_measured_from_the_quantised_base(base, recipe_file, tmp_path):
    """It is there once, and is the reference where the adapter is switched off."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"{n}!"} for n in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = ["stage=dpo", f"data.train={pairs}", "export.merge=false", "lora.dropout=0.0"]
    changes += ["trainer.max_steps=2", "trainer.logging_steps=1"]
    run = run_recipe(load_recipe(recipe_file, changes), tmp_path / "run")
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in log if row["kind"] == "train"]
    assert steps[0]["rewards/margins"] == 0 and steps[1]["rewards/margins"] != 0
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_an_8_bit_optimizer_resumes_exactly(recipe_file, tmp_path):
    """Its parameters have one table in common, which the checkpoint's file holds for each."""
    recipe = load_recipe(recipe_file, ["export.merge=false", "trainer.optim=adamw_8bit"])
    run = run_recipe(recipe, tmp_path / "run")
    adapter = run / "adapter" / "adapter_model.safetensors"
    straight = adapter.read_bytes()
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    run_recipe(recipe, run, resume=True)
    assert adapter.read_bytes() == straight
