"""Strength is the same however its gradients are taken, and takes no more than it needs."""

from __future__ import annotations

import gc

import pytest
import torch

from moe_finetune import measure_strength
from moe_finetune.moe.layers import backbone_of
from moe_finetune.training import replay
from moe_finetune.training.memory.borders import LiveBytes
from moe_finetune.training.replay import Replay
from moe_finetune.training.specialization import Specialization
from tests import tiny
from tests.training.policy import adapted
from tests.training.strength import BATCHES, agree, by_hand


def forwards_of(model, terms):
    """Rows, and the forwards it took to measure them beyond the window's own."""
    seen = []
    handle = backbone_of(model).register_forward_hook(lambda *_: seen.append(1))
    with torch.random.fork_rng():
        rows = measure_strength(model, {"terms": terms}, BATCHES)
    handle.remove()
    return rows, len(seen) - len(BATCHES) - 1  # the first looks for what each term reaches


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_forward_a_batch_serves_all_terms_and_the_language_loss_needs_none(
    terms, checkpointing
):
    model = adapted()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    quiet = {name: {**o, "weight": 1e-4 * o["weight"]} for name, o in terms.items()}
    for some in (quiet, {"dpp": quiet["dpp"]}):
        rows, forwards = forwards_of(model, some)
        assert forwards == len(BATCHES)
        agree(rows, by_hand(adapted(), some, BATCHES))


def test_a_drowned_language_loss_gets_a_backward_of_its_own(terms):
    rows, forwards = forwards_of(adapted(), terms)
    assert forwards == 2 * len(BATCHES)
    assert max(row["share_experts"] for row in rows) > 3
    agree(rows, by_hand(adapted(), terms, BATCHES))


@pytest.mark.parametrize("how", ["one term at a time", "no graph is kept", "in shards"])
def test_however_gradients_are_taken_the_strength_is_the_same(terms, monkeypatch, how):
    if how == "one term at a time":  # what trains is too large to hold once a term
        monkeypatch.setattr(Replay, "_at_once", False)
    elif how == "no graph is kept":
        monkeypatch.setattr(replay, "_compiled", lambda model: True)
    else:  # as FSDP2 needs it: through the model's output, one term's losses switched on
        monkeypatch.setattr(replay, "_sharded", lambda parameters: True)
    rows, forwards = forwards_of(adapted(), terms)
    # The language loss's among them; these weights drown it.
    assert forwards == (1 if how == "in shards" else len(terms) + 1) * len(BATCHES)
    agree(rows, by_hand(adapted(), terms, BATCHES))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_measuring_holds_one_forward_and_leaves_nothing(terms, checkpointing):
    """Bytes of live tensors, without the garbage collector's help."""
    model, batch = adapted().train(), tiny.batch(rows=8, length=64, seed=1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    method = {"terms": terms, "strength": {"first": False}}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-9)

    def step(work):
        live.reset()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        work.step()
        return live.reset()

    with Specialization(model, method, total_steps=4) as work:
        gc.disable()
        try:
            with LiveBytes() as live:
                step(work)
                plain, before = step(work), live.now
                work.strength.every = 1
                work.strength.begin(work.steps)
                work.strength.every = None
                measured, left = step(work), live.now - before
        finally:
            gc.enable()
    assert {row.term for row in work.strength.rows} == set(terms)
    # Beside what a step holds: a gradient of each of eleven terms.
    assert plain < measured < 1.35 * plain
    assert left == 0
