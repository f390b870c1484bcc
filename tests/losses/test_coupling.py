from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import distributed

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext, ModelFacts, PreviousLayer
from moe_finetune.losses.functional import coupling_loss, transition_table
from moe_finetune.losses.objective import Objective
from tests.losses import reference
from tests.losses.cases import make, mask, record

TERM = TERMS["coupling"]


def term(**options):
    return TERM(TERM.Options(weight=1.0, **options))


def below(values, layer=1):
    return PreviousLayer(layer, values["probs_TE"], values["index_TK"])


def above(values, mask_T=None, layer=2, seed=11):
    """The next layer's record, with logits of its own."""
    return record({**values, "logits_TE": make(seed=seed)["logits_TE"]}, mask_T=mask_T, layer=layer)


def test_token_pairing_worked_by_hand():
    # A = {0, 2}: .5 + .3; the two best above: .6 + .3.
    probs = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    following = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64)
    loss = coupling_loss(probs, torch.tensor([[2, 0]]), following, 2)
    assert loss.item() == pytest.approx(-0.8 * 0.9)


def test_transition_pairing_worked_by_hand():
    # Expert 0 goes on to {0, 1}, expert 2 to {0, 2}: .5 (.1 + .6) + .3 (.1 + .3).
    probs = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    following = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64)
    table = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 1.0], [5.0, 0.0, 1.0]])
    loss = coupling_loss(probs, torch.tensor([[2, 0]]), following, 2, transitions_EE=table)
    assert loss.item() == pytest.approx(-(0.5 * 0.7 + 0.3 * 0.4))


def test_ties_may_be_broken_either_way():
    probs = torch.full((2, 4), 0.25)
    loss = coupling_loss(probs, torch.tensor([[0, 1], [2, 3]]), probs, 2)
    assert loss.item() == pytest.approx(-0.25)


def test_table_carries_no_gradient():
    values = make()
    table = values["transitions_EE"].requires_grad_()
    probs = values["probs_TE"].requires_grad_()
    inputs = (probs, values["index_TK"], values["next_probs_TE"], 3)
    grads = torch.autograd.grad(
        coupling_loss(*inputs, transitions_EE=table), (table, probs), allow_unused=True
    )
    assert grads[0] is None and grads[1].norm() > 0


def test_transition_table_equals_the_slow_loop():
    values, keep = make(), mask(17)
    inputs = (values["probs_TE"], values["index_TK"], values["next_probs_TE"])
    torch.testing.assert_close(transition_table(*inputs), reference.transitions(*inputs))
    poisoned = [x.masked_fill(~keep.unsqueeze(1), 10**6) for x in inputs]
    torch.testing.assert_close(
        transition_table(*poisoned, keep), reference.transitions(*inputs, keep)
    )


def test_bad_top_k():
    values = make()
    for top_k in (0, 8):
        with pytest.raises(ValueError, match=f"top_k is {top_k}, expected 1 to E=7"):
            coupling_loss(values["probs_TE"], values["index_TK"], values["next_probs_TE"], top_k)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_term_joins_a_layer_with_the_one_below(score):
    values, keep = make(), mask(17)
    upper = replace(above(values, keep), score=score)
    got = term().loss(upper, LayerContext(previous=below(values)))
    probs = upper.logits_TE.softmax(-1)
    if score == "sigmoid":
        probs = upper.logits_TE.sigmoid()
        probs = probs / probs.sum(-1, keepdim=True)
    expected = reference.coupling(values["probs_TE"], values["index_TK"], probs, 3, keep)
    torch.testing.assert_close(got, expected)


def test_the_first_moe_layer_has_no_term():
    assert term().loss(record(make()), LayerContext()) is None
    assert term().needs == {"previous"}


def test_running_table_moves_once_a_forward_and_recomputation_meets_the_same():
    coupling = term(pairing="transition", decay=0.75)
    first, second = make(seed=1), make(seed=2)
    contexts = [LayerContext(previous=below(v)) for v in (first, second)]
    uppers = [above(first, seed=5), above(second, seed=6)]
    tables = [
        reference.transitions(v["probs_TE"], v["index_TK"], u.logits_TE.softmax(-1))
        for v, u in zip((first, second), uppers, strict=True)
    ]
    running = [tables[0], 0.75 * tables[0] + 0.25 * tables[1]]
    losses = []
    for values, upper, context, table in zip(
        (first, second), uppers, contexts, running, strict=True
    ):
        losses.append(coupling.loss(upper, context))
        torch.testing.assert_close(coupling.state_dict(), {"transitions.2": table})
        expected = reference.coupling(
            values["probs_TE"],
            values["index_TK"],
            upper.logits_TE.softmax(-1),
            3,
            transitions_EE=table,
        )
        torch.testing.assert_close(losses[-1], expected)
    # The first forward is run again after the second moved the table.
    again = LayerContext(below(first), first_visit=False, draws=contexts[0].draws)
    assert torch.equal(coupling.loss(uppers[0], again), losses[0])
    torch.testing.assert_close(coupling.state_dict()["transitions.2"], running[1])


def test_tables_are_kept_per_layer_and_survive_saving():
    values = make()
    coupling = term(pairing="transition")
    for layer in (4, 11):
        upper = above(values, layer=layer, seed=layer)
        coupling.loss(upper, LayerContext(previous=below(values, layer - 1)))
    state = coupling.state_dict()
    assert set(state) == {"transitions.4", "transitions.11"}
    assert not torch.allclose(state["transitions.4"], state["transitions.11"])
    assert not any(table.requires_grad for table in state.values())

    restored = term(pairing="transition")
    restored.load_state_dict(state)
    upper = above(values, layer=11, seed=3)
    for one in (coupling, restored):
        one.loss(upper, LayerContext(previous=below(values, 10)))
    assert torch.equal(
        restored.state_dict()["transitions.11"], coupling.state_dict()["transitions.11"]
    )


def test_a_forward_without_counted_tokens_keeps_the_choice():
    values = make()
    coupling = term(pairing="transition")
    upper = above(values)
    before = coupling.loss(upper, LayerContext(previous=below(values)))
    nothing = torch.zeros(17, dtype=torch.bool)
    assert coupling.loss(above(values, nothing), LayerContext(previous=below(values))) == 0
    table = coupling.state_dict()["transitions.2"]
    inputs = (values["probs_TE"], values["index_TK"], upper.distribution_TE, 3)
    torch.testing.assert_close(coupling_loss(*inputs, transitions_EE=table), before)


@pytest.mark.parametrize("pairing", ["token", "transition"])
def test_term_sends_gradients_to_both_layers(pairing):
    values = make()
    lower = values["logits_TE"].clone().requires_grad_()
    upper = above(values)
    logits = upper.logits_TE.clone().requires_grad_()
    previous = PreviousLayer(1, lower.softmax(-1), values["index_TK"])
    loss = term(pairing=pairing).loss(replace(upper, logits_TE=logits), LayerContext(previous))
    assert all(grad.norm() > 0 for grad in torch.autograd.grad(loss, (lower, logits)))


def test_a_model_without_a_pair_is_refused():
    facts = ModelFacts(moe_layers=(3,), num_experts=7, top_k=3, vocab_size=13)
    with pytest.raises(ObjectiveError, match="joins two MoE layers, but this model has 1"):
        term().check(facts)
    several = replace(facts, moe_layers=(3, 4, 5))
    with pytest.raises(ObjectiveError, match=r"layers: \[3\] contains only the first MoE layer"):
        term(layers=[3]).check(several)
    term(layers=["3-4"]).check(several)
    term().check(several)


def test_bad_options():
    for options in ({"pairing": "layer"}, {"decay": 1.0}, {"decay": -0.1}):
        with pytest.raises(ValidationError, match=next(iter(options))):
            TERM.Options(weight=1.0, **options)


def _two_ranks(rank, store):
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    tables = {}
    for other in (0, 1):
        coupling = term(pairing="transition")
        for layer in (2, 3):
            values = make(seed=10 * other + layer)
            upper = above(values, layer=layer, seed=other + 5)
            coupling.loss(upper, LayerContext(previous=below(values, layer - 1)))
        tables[other] = coupling.state_dict()
        if other == rank:
            mine = coupling
    mine.reduce_over_ranks()
    for name, table in mine.state_dict().items():
        torch.testing.assert_close(table, (tables[0][name] + tables[1][name]) / 2)
    distributed.destroy_process_group()


def test_tables_are_averaged_over_ranks(warm, tmp_path):
    torch.multiprocessing.spawn(_two_ranks, (f"file://{tmp_path}/store",), nprocs=2)


def test_one_process_has_nothing_to_average():
    values = make()
    coupling = term(pairing="transition")
    coupling.reduce_over_ranks()
    coupling.loss(above(values), LayerContext(previous=below(values)))
    before = coupling.state_dict()
    coupling.reduce_over_ranks()
    assert torch.equal(coupling.state_dict()["transitions.2"], before["transitions.2"])


def test_the_mean_over_layers_is_the_mean_over_pairs():
    """Four MoE layers make three pairs."""
    facts = ModelFacts(moe_layers=(1, 2, 3, 4), num_experts=7, top_k=3, vocab_size=13)
    values = make()
    lower = PreviousLayer(3, values["next_probs_TE"], values["index_TK"])
    totals = []
    for reduction in ("sum", "mean"):
        options = {"coupling": {"weight": 0.6, "layers_reduction": reduction}}
        objective = Objective.from_options(options, facts)
        totals.append(objective(record(values, layer=4), LayerContext(previous=lower)).total)
    torch.testing.assert_close(totals[1], totals[0] / 3)
    options["coupling"]["layers"] = [1, 2, 4]
    objective = Objective.from_options(options, facts)
    two = objective(record(values, layer=4), LayerContext(previous=lower)).total
    torch.testing.assert_close(two, totals[0] / 2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shift", [0.0, -60.0, -200.0])
def test_distributions_sum_to_one_however_small_the_scores(score, shift):
    values = make()
    held = record({**values, "logits_TE": values["logits_TE"].float() + shift}, score=score)
    ones = torch.ones(17)
    torch.testing.assert_close(held.distribution_TE.sum(-1), ones)
    torch.testing.assert_close(held.scores_TK.sum(-1), ones)
    torch.testing.assert_close(held.scores_TE.sum(-1), ones)
    if shift == 0.0:
        scores = values["logits_TE"].float().sigmoid()
        wanted = scores if score == "sigmoid" else values["logits_TE"].float().exp()
        wanted = wanted / wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(held.distribution_TE, wanted)
