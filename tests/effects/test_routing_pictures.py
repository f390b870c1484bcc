"""P0's Figure 1 and overlap against MaxVio, drawn from results."""

import pytest

from eval.effects.routing_pictures import draw_routing
from eval.effects.shards import Shard


def _results(*arms):
    probe = {"score_variance": 0.02, "max_violation": 0.3, "expert_overlap": 0.4}
    return {
        Shard("finetune", arm, seed): {"probes": [probe, {**probe, "max_violation": 0.1 * seed}]}
        for arm in arms
        for seed in (1, 2)
    }


@pytest.mark.parametrize(
    ("arms", "drawn"),
    [
        (("balance_0.02", "ov"), ["p0_figure1.png"]),
        (("balance_0.02", "ov", "sc", "erc", "dpp", "ncl"), ["p0_figure1.png", "frontier.png"]),
        (("aux_loss", "erc", "dpp"), ["frontier.png"]),
        (("aux_loss", "erc"), []),
    ],
)
def test_pictures_are_drawn_of_the_arms_that_ran(tmp_path, arms, drawn):
    # Six arms on one point: the places for labels run out, and the last one is kept.
    files = draw_routing(_results(*arms), tmp_path)
    assert [path.name for path in files] == drawn
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(drawn)
    assert all(path.stat().st_size > 5000 for path in files)
