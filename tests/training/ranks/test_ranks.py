"""One process with batch 4 equals two processes with batch 2 (gloo, CPU)."""

import json

import pytest
from safetensors.torch import load_file

from tests.support.ranks import run_ranks
from tests.training.ranks.ranks_worker import EVERY_TERM, METHODS, STEPS, WRONG

pytestmark = pytest.mark.slow
LIMIT = 1e-5


@pytest.fixture(scope="module")
def both(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    found = []
    for world in (1, 2):
        out = folder / str(world)
        run_ranks("tests.training.ranks.ranks_worker", world, out)
        found.append(
            (json.loads((out / "logged.json").read_text()), load_file(out / "w.safetensors"))
        )
    return found


def weights(tensors, name):
    chosen = {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}
    assert len(chosen) >= 20
    return chosen


def furthest(one, two):
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_equal_one(both, method):
    (logged_1, tensors_1), (logged_2, tensors_2) = both
    assert len(logged_1[method]) == STEPS
    for one, two in zip(logged_1[method], logged_2[method], strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            # Statistics count choices; ties apart they are equal to the last digits.
            assert two[name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), name
    assert furthest(weights(tensors_1, method), weights(tensors_2, method)) < LIMIT


@pytest.mark.parametrize("term", EVERY_TERM)
def test_a_term_that_is_lost_would_be_seen(both, term):
    (_, one), _ = both
    lacks = weights(one, f"without {term}")
    whole = {name: value for name, value in weights(one, "every term").items() if name in lacks}
    assert furthest(whole, lacks) > 100 * LIMIT


def test_the_comparison_can_fail(both):
    (_, one), (_, two) = both
    assert furthest(weights(one, WRONG), weights(two, WRONG)) > 10 * LIMIT
