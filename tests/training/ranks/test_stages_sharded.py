"""Every stage's gradients with a method: two ranks with their experts spread over them, two FSDP2
ranks through the launcher's way, both together, and one process.
"""

import json

import pytest
from safetensors.torch import load_file

from moe_finetune.recipe.stages import STAGES
from tests.support import tiny
from tests.support.ranks import furthest, run_ranks
from tests.training.ranks.stages_worker import (
    ALONE,
    BOTH,
    MODES,
    PLAIN,
    RAGGED,
    SHARDED,
    SPREAD,
    TERMS,
    WORLD,
)

pytestmark = pytest.mark.slow
LIMIT = 1e-5


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    tiny.save("qwen3_moe", folder / "base", num_hidden_layers=2)
    run_ranks("tests.training.ranks.stages_worker", WORLD, folder)
    return {
        mode: (load_file(folder / f"{mode}.safetensors"), json.loads(log.read_text()))
        for mode, log in ((mode, folder / f"{mode}.json") for mode in MODES)
    }


def gradients(tensors, case):
    chosen = {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{case}/")}
    assert len(chosen) >= 20
    return chosen


@pytest.mark.parametrize("mode", [SPREAD, SHARDED, BOTH])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_have_the_gradients_of_one_process(found, stage, mode):
    (one, log), (two, other) = found[ALONE], found[mode]
    assert furthest(gradients(two, stage), gradients(one, stage)) <= LIMIT
    for name in ("loss", *(f"losses/{term}" for term in TERMS)):
        assert other[stage][name] == pytest.approx(log[stage][name], rel=LIMIT, abs=1e-6), name
    assert all(log[stage][f"losses/{term}"] > 0 for term in TERMS)


def test_a_method_is_seen_in_the_gradients(found):
    tensors, _ = found[SPREAD]
    assert furthest(gradients(tensors, "sft"), gradients(tensors, PLAIN)) > 100 * LIMIT


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_are_those_of_the_trained_model(found, mode):
    _, log = found[mode]
    assert abs(log["grpo"]["rollout/log_prob_difference"]) < LIMIT


def test_a_rank_whose_completions_have_ended_runs_on_with_the_others(found):
    alone, log = found[ALONE]
    lengths = [log[RAGGED][f"completions/{end}_length"] for end in ("min", "max")]
    assert lengths[0] < lengths[1]
    for mode in (SPREAD, SHARDED, BOTH):
        tensors, other = found[mode]
        assert furthest(gradients(tensors, RAGGED), gradients(alone, RAGGED)) <= LIMIT
        assert other[RAGGED]["routing/changed_from_old_policy"] == 0
        for name in ("rollout/log_prob_difference", "old_policy/log_prob_difference"):
            assert other[RAGGED][name] < LIMIT, (mode, name)
