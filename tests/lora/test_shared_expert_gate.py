"""``lora.shared_expert_gate``: the row by which Qwen's models weigh their shared expert."""

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.files import write_metadata
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import AdapterError, RecipeError
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.models import OURS
from moe_finetune.moe.large.quantized_weights import quantize_model
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.before.refuse_recipe import tell_of_router
from moe_finetune.training.run.train import continue_adapter
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights
from moe_finetune.training.save_and_resume.save_trained import write_adapter
from tests.support import tiny_families
from tests.support.places import places
from tests.support.tables import table, with_more

RANK, ALPHA = 3, 7.5
NAMES = (
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"),
    *("qwen3_5_moe", "qwen4_exp"),
)
GATE = "mlp.shared_expert_gate"
FAMILIES = [
    name if name in ("qwen2_moe", "qwen3_5_moe") else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
]
CASES = table(NAMES, ("lora", "full"), every=2, whole_rows=("qwen2_moe",))


def section(**options):
    return LoraSection(**{"rank": RANK, "alpha": ALPHA, "targets": ["experts"], **options})


def adapted(model, gate, router="frozen", **options):
    model = add_lora(model, section(shared_expert_gate=gate, **options), router)
    randomize(model)
    return model


def randomize(model):
    """By the sorted names, so that two models with the same ones get the same values."""
    torch.manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(trained(model).items()):
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def batch():
    ids = torch.randint(4, 200, (2, 13), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
def logits(model):
    return model.eval()(**batch()).logits.float()


def same(found, wanted, bound=1e-4):
    """Linear attention adds rounding up; `verify_merge` compares the weights to the bit."""
    assert float((found - wanted).norm()) <= bound * float(wanted.norm())


def save(model, folder):
    folder.mkdir()
    write_adapter(model.peft_config["default"], trained_weights(model), folder)
    write_metadata(folder)
    return folder


@pytest.mark.more
def test_the_families_that_have_one():
    gates = {family.name: places(family.name).shared_gates for family in OURS}
    assert {name: found for name, found in gates.items() if found} == dict.fromkeys(NAMES, (GATE,))


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_stock_peft_s(name, train):
    """The same modules, named in PEFT's own config, without the package's forward."""
    where = places(name)
    ours = adapted(tiny_families.model(name), train)
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=rf".*layers\.\d+\.{GATE}" if train == "lora" else [],
        target_parameters=list(where.expert_targets),
        modules_to_save=[GATE] if train == "full" else None,
    )
    stock = get_peft_model(tiny_families.model(name), config)
    randomize(stock)
    assert trained(ours).keys() == trained(stock).keys()
    gates = [key for key in trained(ours) if ".shared_expert_gate." in key]
    assert len(gates) == (2 if train == "lora" else 1) * len(where.moe_layers)
    assert (logits(ours) - logits(tiny_families.model(name))).norm() > 0
    for model in (ours, stock):
        model.train()
    with Recorder(ours, kernel="grouped"):
        found = ours(**batch()).loss
        found.backward()
    wanted = stock(**batch()).loss
    wanted.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for key, parameter in trained(stock).items():
        gradient = trained(ours)[key].grad
        assert ".shared_expert_gate." not in key or parameter.grad.any(), key
        bound = 2e-4 * float(parameter.grad.norm())
        assert float((gradient - parameter.grad).norm()) <= bound, key


@pytest.mark.parametrize(("name", "train"), with_more((), CASES))
def test_saved_merged_converted_and_continued(name, train, tmp_path):
    base = tmp_path / "base"
    tiny_families.model(name).save_pretrained(base)
    model = adapted(tiny_families.model(name), train, targets=["attention", "experts"])
    wanted = logits(model)
    adapter = save(model, tmp_path / "adapter")

    merge_adapter(base, adapter, tmp_path / "merged")
    verify_merge(base, adapter, tmp_path / "merged")
    same(logits(tiny_families.model(name).from_pretrained(tmp_path / "merged")), wanted)
    files = [load_file(tmp_path / f / "model.safetensors") for f in ("base", "merged")]
    changed = [key for key in files[0] if not torch.equal(files[0][key], files[1][key])]
    assert sum(key.endswith(f"{GATE}.weight") for key in changed) == tiny_families.LAYERS

    plain = tiny_families.model(name).from_pretrained(base)
    same(logits(PeftModel.from_pretrained(plain, adapter)), wanted)

    other = convert_adapter(adapter, base, tmp_path / "other", FORMS["per-expert"])
    back = convert_adapter(other, base, tmp_path / "back", FORMS["peft"])
    stored = [load_file(f / "adapter_model.safetensors") for f in (adapter, back)]
    of_gates = [key for key in stored[0] if "shared_expert_gate" in key]
    assert of_gates and all(torch.equal(stored[0][key], stored[1][key]) for key in of_gates)

    again = add_lora(
        tiny_families.model(name),
        section(rank=5, alpha=5.0, targets=["attention", "experts"], shared_expert_gate=train),
        "frozen",
    )
    continue_adapter(again, adapter, open_checkpoint(base))
    same(logits(again), wanted)
    without = add_lora(tiny_families.model(name), section(targets=["attention", "experts"]), "full")
    with pytest.raises(AdapterError, match=r"set router\.train or lora\.shared_expert_gate"):
        continue_adapter(without, adapter, open_checkpoint(base))


def test_vllm_serves_the_factors_and_refuses_a_gate_that_trained_in_full(tmp_path):
    base = tmp_path / "base"
    tiny_families.model("qwen2_moe").save_pretrained(base)
    kept = save(adapted(tiny_families.model("qwen2_moe"), "lora"), tmp_path / "lora")
    convert_adapter(kept, base, tmp_path / "vllm", FORMS["vllm"])
    whole = save(adapted(tiny_families.model("qwen2_moe"), "full"), tmp_path / "full")
    with pytest.raises(AdapterError, match=r"shared_expert_gate\.weight' trained in full"):
        convert_adapter(whole, base, tmp_path / "refused", FORMS["vllm"])


@pytest.mark.parametrize("router", ["frozen", "full", "lora"])
@pytest.mark.parametrize("train", ["lora", "full"])
def test_next_to_the_router_and_without_targets(router, train):
    """Without LoRA anywhere, the model's own weights train."""
    model = adapted(tiny_families.model("qwen2_moe"), train, router, targets=[])
    assert isinstance(model, PeftModel) == ("lora" in (train, router))
    names = [name.rpartition(".mlp.")[2] for name in trained(model)]
    expected = {"shared_expert_gate"} if router == "frozen" else {"gate", "shared_expert_gate"}
    assert {name.partition(".")[0] for name in names} == expected
    groups = lora_coverage(model).groups
    hidden = tiny_families.HIDDEN
    each = hidden if train == "full" else RANK * (hidden + 1)
    assert groups["shared experts"].trained_parameters == tiny_families.LAYERS * each
    assert groups["shared experts"].reached_parameters == tiny_families.LAYERS * hidden


@pytest.mark.parametrize("targets", [["attention"], []])
def test_a_bfloat16_model_trains_it_in_float32(targets):
    model = tiny_families.model("qwen2_moe").bfloat16()
    model = add_lora(model, section(targets=targets, shared_expert_gate="full"), "frozen").train()
    gates = [p for name, p in trained(model).items() if "shared_expert_gate" in name]
    assert {p.dtype for p in gates} == {torch.float32}
    out = model(**batch())
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and all(p.grad.any() for p in gates)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_next_to_quantized_weights(train):
    model = tiny_families.model("qwen2_moe")
    quantize_model(model)
    model = adapted(model, train, targets=["attention", "experts"]).train()
    with Recorder(model):
        model(**batch()).loss.backward()
    gates = {name: p for name, p in trained(model).items() if "shared_expert_gate" in name}
    assert gates and all(p.grad.any() for p in gates.values())


def test_a_part_of_its_own_rank():
    parts = {"shared_expert_gate": {"rank": 2, "alpha": 9.0}}
    model = adapted(tiny_families.model("qwen2_moe"), "lora", parts=parts)
    modules = [m for name, m in model.named_modules() if name.endswith(GATE)]
    assert modules and {m.r["default"] for m in modules} == {2}
    assert {m.scaling["default"] for m in modules} == {4.5}


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_family_without_one_says_so(train, caplog):
    with caplog.at_level(logging.WARNING):
        model = adapted(tiny_families.model("qwen3_moe"), train)
    assert "lora.shared_expert_gate: Qwen3-30B-A3B has none" in caplog.text
    assert all(".experts." in name for name in trained(model))
    with pytest.raises(RecipeError, match=r"has none|matches nothing"):
        add_lora(
            tiny_families.model("qwen3_moe"),
            section(targets=[], shared_expert_gate=train),
            "frozen",
        )


def recipe(**lora):
    return Recipe.model_validate(
        {
            "model": {"path": "base"},
            "data": {"train": "x.jsonl"},
            "router": {"train": "frozen"},
            "lora": {"rank": 4, "targets": [], **lora},
        }
    )


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_run_says_that_its_adapter_is_served_after_a_merge(train, caplog):
    start = SimpleNamespace(recipe=recipe(shared_expert_gate=train), adapted=True)
    with caplog.at_level(logging.INFO):
        tell_of_router(start)
    told = "lora.shared_expert_gate: full: vLLM serves this run's adapter only after a merge"
    assert (told in caplog.text) == (train == "full")


def test_a_recipe_that_contradicts_itself_is_refused():
    assert recipe(shared_expert_gate="full").lora.shared_expert_gate == "full"
    with pytest.raises(ValueError, match="nothing trains"):
        recipe()
    parts = {"shared_expert_gate": {"rank": 2}}
    with pytest.raises(ValueError, match=r"set lora\.shared_expert_gate: lora"):
        recipe(shared_expert_gate="full", parts=parts)
