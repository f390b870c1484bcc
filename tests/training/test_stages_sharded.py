"""Every stage's gradients with a method: two FSDP2 ranks through the launcher's way, and one."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from moe_finetune.recipe.stages import STAGES
from tests.ranks import run_ranks
from tests.training.stages_worker import PLAIN, TERMS, WORLD

pytestmark = pytest.mark.slow
LIMIT = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    run_ranks("tests.training.stages_worker", WORLD, folder)
    return {
        world: (load_file(folder / f"{world}.safetensors"), json.loads(log.read_text()))
        for world, log in ((world, folder / f"{world}.json") for world in (WORLD, 1))
    }


def gradients(tensors, case):
    chosen = {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{case}/")}
    assert len(chosen) >= 20
    return chosen


def furthest(one, two):
    assert one.keys() == two.keys()
    return max(
        float((one[n] - two[n]).abs().max() / one[n].abs().max().clamp_min(1e-6)) for n in one
    )


@pytest.mark.parametrize("stage", STAGES)
def test_two_sharded_ranks_have_the_gradients_of_one_process(found, stage):
    (one, log), (two, other) = found[1], found[WORLD]
    assert furthest(gradients(one, stage), gradients(two, stage)) <= LIMIT
    for name in ("loss", *(f"losses/{term}" for term in TERMS)):
        assert other[stage][name] == pytest.approx(log[stage][name], rel=LIMIT, abs=1e-6), name
    assert all(log[stage][f"losses/{term}"] > 0 for term in TERMS)


def test_a_method_is_seen_in_the_gradients(found):
    tensors, _ = found[WORLD]
    assert furthest(gradients(tensors, PLAIN), gradients(tensors, "sft")) > 100 * LIMIT
