"""Every term, sharded on two ranks, checkpointed too, and with experts spread over them, has the
gradients of the plain model; so it has with experts spread and the rest sharded.
"""

import json

import pytest

from moe_finetune.losses import TERMS
from tests.support.ranks import run_ranks
from tests.training.ranks.sharded_worker import (
    CASES,
    EVERY_TERM,
    MEASURED,
    SPREAD,
    TIED,
    WORLD,
    modes,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("p0_released")]
LIMIT = 1e-4
CLOSER = {"spread": 1e-5, "spread and sharded": 1e-5}


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded") / "found.json"
    run_ranks("tests.training.ranks.sharded_worker", WORLD, out)
    return json.loads(out.read_text())


@pytest.mark.parametrize(("case", "mode"), [(case, mode) for case in CASES for mode in modes(case)])
def test_gradients_are_those_of_the_plain_model(found, case, mode):
    got = found[case][mode]
    assert "error" not in got, got["error"]
    assert got["gradients"] <= CLOSER.get(mode, LIMIT)
    assert got["biases"] == 0.0
    for plain, here in got["losses"]:
        assert here == pytest.approx(plain, rel=LIMIT, abs=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
def test_the_gradients_are_not_those_without_a_method(found, case):
    """Of all terms together, none may be hidden by the others."""
    seen = found[case]["plain"]
    assert min(seen.values()) > 100 * LIMIT, seen
    assert case != EVERY_TERM or seen.keys() == {"acts", *TERMS}


@pytest.mark.parametrize("mode", TIED)
def test_a_recomputation_takes_the_experts_of_the_first_visit(found, mode):
    got = found["ties"][mode]
    assert got["changed"] > 0.05
    assert got["kept"] < 1e-4
    assert mode in SPREAD or got["repeated"] > 1e-2


@pytest.mark.parametrize("case", MEASURED)
def test_strength_of_a_sharded_model_is_that_of_a_whole_one(found, case):
    wanted, got = found[case]["both"]["strength"]
    assert wanted.keys() == got.keys() and wanted
    for term, row in wanted.items():
        assert max(row["share_router"], row["share_experts"]) > 0, term
        assert got[term] == pytest.approx(row, rel=1e-4, abs=1e-7), term


def test_an_adapter_that_fsdp_would_never_average_is_refused(found):
    assert "lora_" in found["refused"] and "each rank would train its own" in found["refused"]
