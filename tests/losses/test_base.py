import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS
from moe_finetune.losses.base import ModelFacts, Schedule, TermOptions, expand_layers
from moe_finetune.losses.term import term
from tests.support.objectives import objective_of

NAMES = list(TERMS)
FACTS = ModelFacts(moe_layers=(1, 2, 3, 4), num_experts=7, top_k=3, vocab_size=13)


def test_each_term_is_under_its_own_name():
    assert {"load_balance", "erc", "coupling"} < set(NAMES)
    for name, kind in TERMS.items():
        assert kind.name == name
        assert kind.source and kind.reads and kind.trains <= {"router", "experts"}
    with pytest.raises(ObjectiveError, match="unknown loss term 'variances'; did you mean 'vari"):
        TERMS["variances"]


def test_linear_warm_up_reaches_one_and_stays():
    schedule = Schedule(kind="linear", warmup_steps=4)
    factors = [schedule.factor(step, 100) for step in (0, 1, 3, 4, 99)]
    assert factors == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert Schedule(kind="linear").factor(0, 100) == 1.0


def test_cosine_falls_to_zero_after_its_warm_up():
    schedule = Schedule(kind="cosine", warmup_steps=2)
    factors = [schedule.factor(step, 10) for step in (0, 1, 2, 4, 6, 10, 15)]
    expected = [0.5, 1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, 0.0, 0.0]
    assert factors == pytest.approx(expected)
    assert schedule.factor(5, 2) == 1.0


def test_constant_is_constant():
    assert {Schedule().factor(step, 10) for step in range(20)} == {1.0}


@pytest.mark.parametrize(
    ("entries", "layers"),
    [([4, "8-10"], {4, 8, 9, 10}), (["7"], {7}), (["3-3", 3], {3})],
)
def test_ranges_of_layers(entries, layers):
    assert expand_layers(entries) == layers
    options = TermOptions(weight=1.0, layers=entries)
    assert {layer for layer in range(20) if options.selects(layer)} == layers


@pytest.mark.parametrize("entry", ["a", "5-", "-5", "9-8", "1-2-3"])
def test_bad_ranges(entry):
    with pytest.raises(ValidationError, match=f"'{entry}'"):
        TermOptions(weight=1.0, layers=[entry])


def test_a_term_on_no_layer_is_refused():
    with pytest.raises(ValidationError, match="an empty list selects no layer"):
        TermOptions(weight=1.0, layers=[])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "supervised_routing"])
def test_layers_that_are_no_moe_layers_are_refused(name):
    kind = TERMS[name]
    kind(kind.Options(weight=1.0, layers=["2-4"])).check(FACTS)
    with pytest.raises(ObjectiveError, match=rf"terms\.{name}\.layers: \[0, 5\] are not MoE"):
        kind(kind.Options(weight=1.0, layers=["0-5"])).check(FACTS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [-1e-3, float("nan"), float("inf"), "much"])
def test_bad_weights(name, weight):
    with pytest.raises(ValidationError, match="weight"):
        TERMS[name].Options(weight=weight)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_are_refused(name):
    with pytest.raises(ValidationError, match="wieght"):
        TERMS[name].Options(weight=0.0, wieght=1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "weight is missing; give a weight, or a share"),
        ({"weight": 1.0, "every": 10}, "every: is only valid with a share"),
        ({"share": 0.0}, "share"),
        ({"share": -0.1}, "share"),
    ],
)
def test_options_that_do_not_say_a_strength(options, said):
    with pytest.raises(ValidationError, match=said):
        TermOptions(**options)


def test_a_share_takes_the_weights_place_and_weight_zero_still_removes():
    assert TermOptions(weight=1e-3, share=0.1).weight is None
    assert not TermOptions(share=0.1).removed
    assert TermOptions(weight=0.0, share=0.1).removed


@pytest.mark.parametrize("name", ["load_balance", "coupling"])
def test_terms_on_the_selection_leave_out_layers_that_look_experts_up(name):
    facts = replace(FACTS, fixed_layers=(1, 3))
    assert facts.selecting_layers == (2, 4)
    objective = objective_of({name: {"weight": 1.0}, "z_loss": {"weight": 1.0}}, facts)
    by_name = {term.name: term for term in objective.terms}
    assert [by_name[name].applies(layer) for layer in (1, 2, 3, 4)] == [False, True, False, True]
    assert by_name["z_loss"].applies(3)
    for options, wrong in (
        ({"layers": [2, 3]}, facts),
        ({}, replace(FACTS, fixed_layers=FACTS.moe_layers)),
    ):
        with pytest.raises(
            ObjectiveError,
            match=f"terms.{name} acts on the selection of experts, but layers .*3",
        ):
            objective_of({name: {"weight": 1.0, **options}}, wrong)


def test_erc_needs_router_and_experts_in_one_space():
    with pytest.raises(ObjectiveError, match="router and experts read different vectors"):
        objective_of({"erc": {"weight": 1.0}}, replace(FACTS, shared_input_space=False))


def test_a_formula_of_unknown_parameters_is_refused_with_what_it_may_read():
    def bare(scores_TE):
        return scores_TE.sum()

    def misspelled(scores_ET: torch.Tensor):
        return scores_ET.sum()

    for formula, message in (
        (bare, "'scores_TE' has no annotation.*logits_TE, mask_T.*annotated as Annotated"),
        (misspelled, "'scores_ET' is not in a layer's record.*scores_TE"),
    ):
        with pytest.raises(ValueError, match=message):
            term("mine", source="-", reads="scores", trains="router")(formula)
    assert "mine" not in TERMS
