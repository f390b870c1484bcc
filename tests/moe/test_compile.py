"""Compiled decoder layers, with graph breaks at the hooks, give the gradients of plain ones."""

from __future__ import annotations

import pytest

from moe_finetune.losses.objective import Objective
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import model_facts
from tests import tiny
from tests.moe.cases import TERMS, adapted, assert_close, gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_compiled_layers(name):
    terms = {**TERMS, "coupling": {"weight": 0.2}, "specialization": {"weight": 0.3}}
    model, batch = adapted(name), tiny.batch()
    objective = Objective.from_options(terms, model_facts(model))
    with Recorder(model, objective):
        model(**batch).loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    with Recorder(model, objective):
        for layer in model.get_base_model().model.layers:
            layer.compile(backend="aot_eager")
        model(**batch).loss.backward()
    assert_close(gradients(model), wanted, 1e-5)
