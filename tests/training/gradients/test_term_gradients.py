"""Each loss's gradient is taken on the trainer's own graph, which is left as it was."""

import gc

import pytest
import torch

from eval.bench.measured import LiveBytes
from moe_finetune import measure_strength
from moe_finetune.errors import ObjectiveError
from moe_finetune.moe.layers import backbone_of
from moe_finetune.training.measures.term_gradients import TermGradients
from moe_finetune.training.specialization import Specialization
from tests.support import tiny
from tests.training.cases import adapted
from tests.training.strength.strength import BATCHES, agree, by_hand


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("how", ["plain", "checkpointing", "on the host"])
def test_however_the_model_runs_the_strength_is_the_same(terms, monkeypatch, how):
    model = adapted()
    if how == "checkpointing":
        checkpointed(model)
    elif how == "on the host":
        monkeypatch.setattr(TermGradients, "_is_large", lambda self: True)
    forwards = []
    backbone_of(model).register_forward_hook(lambda *_: forwards.append(1))
    rows = measure_strength(model, {"terms": terms}, BATCHES)
    assert len(forwards) == len(BATCHES)
    assert max(row["share_experts"] for row in rows) > 3  # a drowned language loss among them
    agree(rows, by_hand(adapted(), terms, BATCHES))


@pytest.mark.parametrize("by", ["layer", "trainer"])
def test_a_compiled_model_is_not_measured(terms, monkeypatch, by, caplog):
    """Not measured where it is only shown; refused where a weight depends on it."""
    model = adapted().train()
    if by == "layer":
        backbone_of(model).layers[0].compile(backend="aot_eager")
    else:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with Specialization(model, {"terms": terms}):
        assert "shares are not measured: torch.compile allows one backward" in caplog.text
    share = {"terms": {"load_balance": {"share": 0.1}}}
    model = adapted().train() if by == "trainer" else model
    refused = pytest.raises(ObjectiveError, match=r"torch\.compile allows one backward")
    with refused, Specialization(model, share):
        pass


def test_a_trainer_that_gives_each_saved_tensor_back_once(terms):
    """As offloading of activations does."""
    stored = {}

    def pack(tensor):
        stored[len(stored)] = tensor
        return len(stored) - 1

    def unpack(number):
        tensor, stored[number] = stored[number], None
        assert tensor is not None, "a saved tensor was asked for twice"
        return tensor

    with Specialization(adapted().train(), {"terms": terms}) as work:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = work.model(**BATCHES[0]).loss
        loss.backward()
        work.step()
        rows = [row.row() for row in work.strength.rows]
    assert stored  # the head's
    agree(rows, by_hand(adapted(), terms, BATCHES[:1]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_measuring_leaves_the_gradients_of_the_step_alone(terms, checkpointing):
    def gradients(first):
        model = checkpointed(adapted()) if checkpointing else adapted()
        method = {"terms": terms, "strength": {"first": first}}
        with torch.random.fork_rng(), Specialization(model.train(), method, dropout=0.1) as work:
            torch.manual_seed(3)
            for batch in BATCHES:
                model(**batch).loss.backward()
            work.step()
            assert bool(work.strength.rows) == first
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    measured, plain = gradients(True), gradients(False)
    assert measured.keys() == plain.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, measured[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_measuring_takes_a_gradient_of_each_loss_and_leaves_nothing(terms, checkpointing):
    """Bytes of live tensors, without the garbage collector's help."""
    model, batch = adapted().train(), tiny.batch(rows=8, length=64, seed=1)
    if checkpointing:
        checkpointed(model)
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
                work.strength.first = True
                work.strength.begin(0)
                measured, left = step(work), live.now - before
        finally:
            gc.enable()
    assert {row.term for row in work.strength.rows} == set(terms)
    own = sum(
        p.numel() * p.element_size()
        for layer in work.recorder.layers
        for module in (layer.router, layer.outer_experts)
        for p in module.parameters()
        if p.requires_grad
    )
    assert plain < measured < plain + 1.6 * own * (len(terms) + 1)
    assert left == 0


def test_a_micro_batch_that_is_measured_leaves_nothing_but_sums(terms):
    model, sizes = adapted().train(), []
    with Specialization(model, {"terms": terms}, accumulation=3) as work:
        gc.disable()
        try:
            with LiveBytes() as live:
                for seed in (1, 2, 3):
                    model(**tiny.batch(rows=3, length=64, seed=seed)).loss.backward()
                    sizes.append(live.now)
        finally:
            gc.enable()
        work.step()
    assert sizes[0] > 0 and sizes[1] == sizes[2]
    assert {row.term for row in work.strength.rows} == set(terms)
