import pytest
import torch
from torch import distributed

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import load_balancing_loss, load_totals
from tests.losses import reference
from tests.losses.cases import make, mask, record

TERM = TERMS["load_balance"]


def term(**options):
    return TERM(TERM.Options(weight=1.0, **options))


def test_worked_by_hand():
    # E=3, K=2. Selections {0,1} and {0,2}: f = (1, 1/2, 1/2); P = (.55, .25, .2).
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]], dtype=torch.float64)
    index = torch.tensor([[1, 0], [0, 2]])
    assert load_balancing_loss(probs, index).item() == pytest.approx(3 * (0.55 + 0.125 + 0.1))
    assert load_balancing_loss(probs, index, variant="deepseek").item() == pytest.approx(1.1625)
    # Both first choices are expert 0: f = (1, 0, 0).
    assert load_balancing_loss(probs, index, variant="gshard").item() == pytest.approx(1.65)
    # Renormalized: (2/3, 1/3, 0) and (5/8, 0, 3/8).
    topk = load_balancing_loss(probs, index, probabilities="topk").item()
    assert topk == pytest.approx(3 * (31 / 48 + (1 / 2) * (1 / 6) + (1 / 2) * (3 / 16)))


def test_first_choice_is_the_most_probable_and_the_lowest_number_among_equals():
    probs = torch.tensor([[0.1, 0.45, 0.45], [0.2, 0.5, 0.3]], dtype=torch.float64)
    for index in ([[1, 2], [2, 1]], [[2, 1], [1, 2]]):
        value = load_balancing_loss(probs, torch.tensor(index), variant="gshard")
        assert value.item() == pytest.approx(3 * (0.45 + 0.5) / 2)


def test_totals_of_one_rank_give_the_pooled_loss_and_gradient():
    values = make()
    keep = mask(17)
    for variant in ("switch", "deepseek", "gshard"):
        for probabilities in ("all", "topk"):
            probs = values["probs_TE"].clone().requires_grad_()
            inputs = (probs, values["index_TK"], keep, variant)
            totals = load_totals(*inputs, probabilities=probabilities)
            pooled = load_balancing_loss(*inputs, probabilities=probabilities)
            total = load_balancing_loss(*inputs, probabilities=probabilities, rank_totals=totals)
            torch.testing.assert_close(total, pooled)
            torch.testing.assert_close(
                torch.autograd.grad(total, probs), torch.autograd.grad(pooled, probs)
            )


def test_bad_arguments():
    values = make()
    probs, index = values["probs_TE"], values["index_TK"]
    with pytest.raises(ValueError, match="variant is 'mixtral', expected one of switch, deepseek"):
        load_balancing_loss(probs, index, variant="mixtral")
    with pytest.raises(ValueError, match="probabilities is 'some', expected one of all, topk"):
        load_balancing_loss(probs, index, probabilities="some")
    with pytest.raises(ValueError, match="sequence_lengths sum to 16, expected T=17"):
        load_balancing_loss(probs, index, sequence_lengths=torch.tensor([10, 6]))
    with pytest.raises(ValueError, match=r"sequence_lengths has shape \(1, 2\)"):
        load_balancing_loss(probs, index, sequence_lengths=torch.tensor([[10, 7]]))
    with pytest.raises(ValueError, match=r"rank_totals has shape \(14,\), expected \(15,\)"):
        load_balancing_loss(probs, index, rank_totals=torch.zeros(14))
    with pytest.raises(ValueError, match="rank_totals and sequence_lengths cannot be"):
        load_balancing_loss(
            probs, index, None, "switch", torch.tensor([17]), rank_totals=torch.zeros(15)
        )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "global_batch"])
def test_term_reads_the_normalised_distribution(score, scope):
    values = make()
    keep = mask(17)
    probs = values["logits_TE"].softmax(-1)
    if score == "sigmoid":
        probs = values["logits_TE"].sigmoid()
        probs = probs / probs.sum(-1, keepdim=True)
    lengths = values["sequence_lengths"] if scope == "sequence" else None
    expected = reference.load_balance(probs, values["index_TK"], keep, "deepseek", lengths)
    got = term(variant="deepseek", scope=scope).loss(record(values, score, keep), LayerContext())
    torch.testing.assert_close(got, expected)


def test_sequence_scope_needs_sequence_lengths():
    values = {**make(), "sequence_lengths": None}
    with pytest.raises(ObjectiveError, match=r"load_balance\.scope: 'sequence'.*micro_batch"):
        term(scope="sequence").loss(record(values), LayerContext())


def _two_ranks(rank, store, sizes):
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    values, keep = make(), mask(17)
    own = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], None)
    for variant in ("switch", "deepseek", "gshard"):
        whole = values["logits_TE"].clone().requires_grad_()
        expected = load_balancing_loss(whole.softmax(-1), values["index_TK"], keep, variant)
        wanted = torch.autograd.grad(expected, whole)[0]

        logits = values["logits_TE"][own].clone().requires_grad_()
        part = {**values, "logits_TE": logits, "index_TK": values["index_TK"][own]}
        context = LayerContext()
        balance = term(variant=variant, scope="global_batch")
        got = balance.loss(record(part, mask_T=keep[own]), context)
        torch.testing.assert_close(got.detach(), expected.detach())
        # Ranks average gradients, so each holds twice its share of the one-process gradient.
        torch.testing.assert_close(torch.autograd.grad(got, logits)[0], 2 * wanted[own])

        # A recomputation on one rank alone must not wait for the other.
        if rank == 0:
            again = balance.loss(
                record(part, mask_T=keep[own]),
                LayerContext(draws=context.draws),
            )
            assert torch.equal(again, got)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_global_batch_on_two_ranks_is_one_process(warm, tmp_path):
    torch.multiprocessing.spawn(_two_ranks, (f"file://{tmp_path}/store", (6, 11)), nprocs=2)
