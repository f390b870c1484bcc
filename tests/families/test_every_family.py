"""Every family of the table: recorded = stock, its facts are true, merged = base + adapter; and for
families of every kind what follows from these.
"""

import re
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
from transformers import AutoConfig

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import CaptureError, ObjectiveError, UnsupportedModelError
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.losses.inject import PerTermLosses
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models import FAMILIES, family_of
from moe_finetune.models.class_structure import class_of
from moe_finetune.models.module_places import Places
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.choice.select_again import Rule, select_with_bias
from moe_finetune.moe.layers import model_facts, moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import resolve_method
from moe_finetune.training import reached_weights
from moe_finetune.training.self_test.family_check import check_family
from tests.checkpoint.golden import check_changed
from tests.families.cases import (
    EACH_KIND,
    KINDS,
    NAMES,
    NEEDS_A_FILE,
    STANDARD_WEIGHTS,
    adapted,
    batch,
    run,
)
from tests.support import names_on_disk, places
from tests.support import tiny_families as tiny
from tests.support.objectives import objective_of

pytestmark = pytest.mark.usefixtures("p0_released")

# Their own gate is taken over all rows at once: the last of a vector round otherwise.
OWN_GATE = {
    *("deepseek_v4", "hy_v4", "minimax_m3_vl", "minimax_m3_vl_text", "nemotron_h"),
    *("glm5_next", "nemotron_h_omni", "gpt_oss", "internvl_gpt_oss"),
}


def loaded(folder):
    """The checkpoint by transformers' own class, without the toolkit."""
    return class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()


def values(family):
    """Each fact of a family that more than one of its tests depends on, with its value."""
    facts, config = FAMILIES[family], places.config(family).get_text_config()
    shown = places.places(family)
    for owner in (facts, facts.rows, shown):
        for name in {field.name for field in fields(owner)} - NAMED - PLACES:
            value = getattr(owner, name)
            value = value(config) if callable(value) else value
            if name in WHETHER:
                value = bool(value)
            yield name, {"scaling": value != 1.0, "groups": value != (1, 1)}.get(name, value)
    yield from ((part, "in the files") for part in names_on_disk.patterns(family))


NAMED = {"name", "title", "model_type", "top_k", "check", "rows", "since", "attention_targets"}
"""Names and numbers, which the contract alone reads: they differ by family."""
PLACES = {field.name for field in fields(Places)} - {
    *("router_weight", "gated", "separate_spaces", "shared")
}
WHETHER = {"shared", "fixed_layers", "part", "architecture", "per_sequence"}
"""Names of which counts whether there are any."""


def test_every_value_of_a_fact_occurs_among_the_kinds():
    missing = {value for family in FAMILIES for value in values(family)}
    assert len(missing) > 50
    assert missing == {value for f in KINDS if f in FAMILIES for value in values(f)}


@pytest.mark.parametrize("family", NAMES)
def test_the_facts_are_those_of_the_class(family):
    """Also that LoRA's gradients under the recorder are stock's, and rows do not see each other."""
    proved = check_family(places.config(family), FAMILIES[family])
    assert proved.ok, proved.text()
    assert len(proved.checks) > 9 and "packed rows" in proved.checks[-1].name


@pytest.mark.parametrize("family", NAMES)
def test_recorded_equals_stock(family):
    plain = tiny.model(family)
    with torch.no_grad():
        before = plain(**batch()).logits
        records = []
        with Recorder(plain, observers=[lambda r, _: records.append(r)], observe="all"):
            recorded = plain(**batch()).logits
    rounding = 2e-6 * float(before.abs().max()) if family in OWN_GATE else 0.0
    assert torch.allclose(before, recorded, rtol=0, atol=rounding)
    facts = model_facts(plain)
    assert [record.layer for record in records] == list(facts.moe_layers)
    assert {record.probs_TE.shape for record in records} == {(51, tiny.EXPERTS)}
    assert {record.index_TK.shape[1] for record in records} == {facts.top_k}
    if FAMILIES[family].own_weights is None:
        check_bias(plain, records)
    check_reach(places.places(family), lora_coverage(adapted(family)).groups)


def check_reach(where, groups):
    """LoRA reaches what the class shows."""
    for name in ("attention", "router", "routed experts", "shared experts"):
        group = groups[name]
        if name == "shared experts" and not where.shared:
            assert group.tensors == 0
            continue
        # All matrices; biases are the rest.
        assert 0.9 * group.parameters < group.reached_parameters <= group.parameters, name


def check_bias(model, records):
    """A bias of 0 leaves the router's own choice; a large one on one expert selects it."""
    for layer, record in zip(moe_layers(model), records, strict=True):
        if layer.index in model_facts(model).fixed_layers:
            continue
        own = record.index_TK, record.weights_TK
        same = select_with_bias(
            record.logits_TE, torch.full((tiny.EXPERTS,), 0.37), *own, Rule(layer)
        )
        assert torch.equal(same[0], own[1]) and torch.equal(same[1], own[0])
        pushed = torch.zeros(tiny.EXPERTS)
        pushed[7] = 9.0
        weights, index = select_with_bias(record.logits_TE, pushed, *own, Rule(layer))
        assert (index == 7).any(-1).all() and not torch.equal(index, own[0])
        assert float((weights - own[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", NAMES)
def test_merged_equals_base_and_adapter(family, tmp_path):
    base = tmp_path / "base"
    tiny.model(family).save_pretrained(base)
    opened = open_checkpoint(base)
    assert opened.experts == dict.fromkeys(opened.places.moe_layers, tiny.EXPERTS)
    model = adapted(family)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    merged = loaded(tmp_path / "merged")
    with torch.no_grad():
        wanted, found = model(**batch()).logits, merged(**batch()).logits
        untouched = tiny.model(family)(**batch()).logits
    # PEFT's own merge of a linear attention is off by 3e-5 of the largest logit.
    assert torch.allclose(wanted, found, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    assert float((wanted - untouched).abs().max()) > 1e-2
    if not FAMILIES[family].since:  # no earlier code merged the others
        check_changed(family, base, tmp_path / "merged")
    if family in KINDS:
        report = verify_merge(base, tmp_path / "adapter", tmp_path / "merged")
        assert report.error < 1e-4 < 1e-2 < report.moved


def test_a_router_that_samples_draws_the_same():
    """Phi's, in training: what it drew is what is recorded."""
    outputs = []
    for recorded in (False, True):
        model = tiny.model("phimoe").train()
        recorder = Recorder(model) if recorded else nullcontext()
        torch.manual_seed(11)
        with recorder:
            outputs.append(run(model))
    (logits, grads), (recorded_logits, recorded_grads) = outputs
    assert torch.allclose(logits, recorded_logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
    for name, grad in grads.items():
        scale = float(grad.abs().max()) + 1e-6
        assert float((grad - recorded_grads[name]).abs().max()) < 2e-4 * scale, name


@pytest.mark.parametrize("family", sorted(set(NAMES) - set(STANDARD_WEIGHTS)))
def test_a_selection_that_cannot_be_made_again_is_refused(family):
    model, reason = tiny.model(family), FAMILIES[family].own_weights
    facts = model_facts(model)
    balancer = BiasBalancer(facts.selecting_layers, facts.num_experts, update=0.1)
    with pytest.raises(CaptureError, match=re.escape(f"{FAMILIES[family].title}: {reason}")):
        Recorder(model, perturbation=balancer).install()


def test_a_quantized_gpt_oss_is_refused():
    quantized = tiny.config("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedModelError, match="quantized; save it in bfloat16"):
        family_of(quantized)


@pytest.mark.parametrize("family", EACH_KIND)
def test_every_preset_reaches(family):
    model = adapted(family, router="full")
    facts = model_facts(model)
    assert len(moe_layers(model)) == len(facts.moe_layers) >= 3
    options = {}
    for preset in set(PRESETS) - NEEDS_A_FILE:
        for name, term in resolve_method(preset).terms.items():
            options[name] = term.model_dump()
    if not (facts.has_gate and facts.shared_input_space):
        with pytest.raises(ObjectiveError, match="erc"):
            objective_of(options, facts)
        del options["erc"]
    routers = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    assert routers == {
        f"{name}.{own}"
        for layer in moe_layers(model)
        for name, module in model.named_modules()
        if module is layer.router.modules_to_save.default
        for own, _ in module.named_parameters()
        if not own.endswith(tiny.BIASES)
    }, "something else trains in full, or the selection bias does"
    objective = objective_of(options, facts)
    reached_weights.check_reach(model, objective)
    acting = reaching(model, objective)
    assert len(acting) >= 8 and all(acting[name] for name in set(acting) - {"erc"})


def reaching(model, objective):
    """How many trainable parameters each term's gradient moves, in a step of its own."""
    joins = PerTermLosses()
    trained = [p for p in model.parameters() if p.requires_grad]
    with Recorder(model.train(), objective) as recorder:
        recorder.change(joins=joins)
        torch.manual_seed(0)
        ids = torch.randint(0, objective.facts.vocab_size, (2, 24))
        mask = torch.ones_like(ids)
        loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum() * 0.0
        acting = {}
        for term in objective.terms:
            joins.only = (term.name,)
            gradients = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
            acting[term.name] = sum(g is not None and bool(g.any()) for g in gradients)
    return acting


@pytest.mark.parametrize(
    "family", ["afmoe", "deepseek_v4", "gemma4_text", "gpt_oss", "inkling_text", "jamba"]
)
def test_a_router_in_full_is_merged(family, tmp_path):
    """With whatever else its module holds: biases, scales, a table of experts."""
    tiny.model(family).save_pretrained(tmp_path / "base")
    model = adapted(family, router="full")
    with torch.no_grad():
        for layer in moe_layers(model):
            for parameter in layer.router.modules_to_save.default.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = loaded(tmp_path / "merged")
    with torch.no_grad():
        wanted, found = model(**batch()).logits, merged(**batch()).logits
    assert torch.allclose(wanted, found, rtol=0, atol=1e-4 * float(wanted.abs().max()))
