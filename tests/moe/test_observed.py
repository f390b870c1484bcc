"""Observed forwards leave a model, its recorder and the generators as they were."""

import random

import numpy as np
import pytest
import torch

from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.observe import observed
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny


class Broken(Exception):
    pass


@pytest.fixture
def model():
    section = LoraSection(rank=4, alpha=8.0, dropout=0.3)
    return add_lora(tiny.model("qwen3_moe"), section, "full").train()


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def state(model):
    return [(module.training, len(module._forward_hooks)) for module in model.modules()]


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(model, installed, fails):
    frozen = model.get_base_model().model.layers[1]
    frozen.eval()  # part of a model in train mode
    ids, seen = torch.arange(4, 24)[None], []

    def observer(record, _):
        seen.append((record.layer, int(record.mask_T.sum()), torch.is_grad_enabled()))
        random.random(), np.random.rand(), torch.rand(())
        if fails and record.layer == 2:
            raise Broken

    def run(recorder):
        before, plan = state(model), recorder and recorder.plan
        try:
            with observed(model, observer, recorder=recorder):
                torch.rand(3)
                model(input_ids=ids, labels=ids.masked_fill(ids < 9, -100))
        except Broken:
            assert fails
        assert state(model) == before and not frozen.training
        assert recorder is None or recorder.plan == plan

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = draws()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    if installed:
        with Recorder(model, token_mask="labels") as recorder:
            run(recorder)
    else:
        run(None)
    assert draws() == expected
    assert seen[:3] == [(layer, 20, False) for layer in range(3)]


def test_training_goes_on_as_if_nothing_had_run(model):
    ids = torch.arange(4, 24)[None]

    def gradients(measured):
        torch.manual_seed(1)
        model.zero_grad()
        if measured:
            with observed(model, lambda record, _: None):
                model(input_ids=ids)
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for plain, after in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, after)
