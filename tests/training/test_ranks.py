"""One process with batch 4 equals two processes with batch 2 (gloo, CPU)."""

import json

import pytest
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.training.ranks_worker import COMPARED, SHARE, STEPS, TRANSITION, WRONG

pytestmark = pytest.mark.slow
LIMIT = 1e-5


@pytest.fixture(scope="module")
def both(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    found = []
    for world in (1, 2):
        out = folder / str(world)
        run_ranks("tests.training.ranks_worker", world, out)
        found.append(
            (json.loads((out / "logged.json").read_text()), load_file(out / "w.safetensors"))
        )
    return found


def weights(tensors, preset):
    chosen = {
        k.removeprefix(f"{preset}/"): v for k, v in tensors.items() if k.startswith(f"{preset}/")
    }
    assert len(chosen) >= 20
    return chosen


def furthest(one, two):
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("preset", [*COMPARED, SHARE])
def test_two_ranks_equal_one(both, preset):
    (logged_1, tensors_1), (logged_2, tensors_2) = both
    assert len(logged_1[preset]) == STEPS
    for one, two in zip(logged_1[preset], logged_2[preset], strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            # Statistics count choices; ties apart they are equal to the last digits.
            assert two[name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), name
    assert furthest(weights(tensors_1, preset), weights(tensors_2, preset)) < LIMIT


def test_the_comparison_can_fail(both):
    (_, one), (_, two) = both
    assert furthest(weights(one, WRONG), weights(two, WRONG)) > 10 * LIMIT


def test_transition_tables_are_averaged(both):
    _, (_, two) = both
    tables = {k: v for k, v in weights(two, TRANSITION).items() if "transitions" in k}
    assert tables and all(float(table.sum()) > 0 for table in tables.values())
