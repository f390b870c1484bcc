"""Compiled decoder layers, with graph breaks at the hooks: the gradients of plain ones, and no
compilation for other groups of tokens.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from tests.moe.cases import TERMS, adapted, assert_close, gradients
from tests.support import tiny
from tests.support.near_ties import adapted as near_tied_model
from tests.support.near_ties import far, step
from tests.support.objectives import objective_of


@pytest.mark.slow
@pytest.mark.parametrize("what", ["layers", "model"])
def test_a_compiled_checkpointed_layer_takes_the_experts_of_its_first_visit(what):
    """Hooks break its graph, so that it runs again in Python."""
    method, batch = {"terms": TERMS, "strength": {"first": False}}, tiny.batch()
    expected, _ = step(near_tied_model("olmoe", None), method, batch)
    torch._dynamo.reset()
    model = near_tied_model("olmoe", "transformers")
    for module in model.get_base_model().model.layers[:2] if what == "layers" else [model]:
        module.compile(backend="aot_eager")
    actual, logged = step(model, method, batch)
    assert logged["routing/changed_in_recomputation"] > 0.05
    assert far(actual, expected) < 1e-4


METHOD = {**TERMS, "coupling": {"weight": 0.2}, "specialization": {"weight": 0.3}}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["loop", "grouped"])
def test_compiled_layers(kernel):
    model = adapted("qwen3_moe")
    objective = objective_of(METHOD, model_facts(model))
    batches = [tiny.batch(seed=seed) for seed in (0, 3, 4, 5, 6)]
    expected, loads = [], []
    with Recorder(
        model,
        objective,
        [lambda record, _: loads.append(record.index_TK.flatten().bincount(minlength=12).tolist())],
        kernel=kernel,
    ):
        for batch in batches:
            model.zero_grad()
            model(**batch).loss.backward()
            expected.append(gradients(model))
    assert loads[0] != loads[len(loads) // 5]  # groups do differ
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with Recorder(model, objective, kernel=kernel):
        for layer in model.get_base_model().model.layers:
            layer.compile(backend=counter)
        compiled = []
        for batch, plain in zip(batches, expected, strict=True):
            model.zero_grad()
            model(**batch).loss.backward()
            assert_close(gradients(model), plain, 1e-5)
            compiled.append(counter.frame_count)
    # A few frames are compiled again for state that the first two steps made; then none is.
    assert compiled[0] > 0 and len(set(compiled[2:])) == 1, compiled
