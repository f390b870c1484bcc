import json

import numpy as np
import pytest

from eval.bench.simulate import compare_placements, simulate_placement
from moe_finetune.errors import DataError
from moe_finetune.metrics import placement_metrics
from moe_finetune.placement.baselines import baseline_placements
from moe_finetune.placement.bucketing import bucket_sequences
from moe_finetune.placement.plan import PlacementPlan
from tests.placement.traces import topical

RANKS = np.array([[2, 0, 1, 1, 0, 2], [0, 1, 2, 0, 1, 2], [1, 1, 0, 2, 2, 0]])


def plan() -> PlacementPlan:
    return PlacementPlan.of("olmoe", (1, 3, 10), 3, RANKS)


def test_plan_round_trip(tmp_path):
    plan().write(tmp_path / "plan.json")
    read = PlacementPlan.read(tmp_path / "plan.json")
    assert (read.model_type, read.layers, read.num_ranks) == ("olmoe", (1, 3, 10), 3)
    assert np.array_equal(read.ranks_LE, RANKS)
    read.check("olmoe", [1, 3, 10], 6)


def test_permutation_gives_the_plan_under_linear_placement():
    order = plan().permutation_LE()
    assert order[0].tolist() == [1, 4, 2, 3, 0, 5]
    linear = np.arange(6) // 2
    for ranks, old_of_new in zip(RANKS, order, strict=True):
        assert ranks[old_of_new].tolist() == linear.tolist()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (("mixtral", [1, 3, 10], 6), "model type olmoe, this checkpoint has mixtral"),
        (("olmoe", [1, 3], 6), r"MoE layers \[1, 3, 10\], this checkpoint has \[1, 3\]"),
        (("olmoe", [1, 3, 10], 8), "experts a layer 6, this checkpoint has 8"),
    ],
)
def test_plan_of_another_model(facts, message):
    with pytest.raises(DataError, match=message):
        plan().check(*facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "not a moe-finetune placement plan"),
        (lambda d: d.update(num_ranks=4), "4 ranks do not divide 6 experts"),
        (lambda d: d.pop("num_ranks"), "cannot be read as a placement plan .KeyError"),
        (
            lambda d: d["layers"]["3"]["ranks"].pop(),
            "cannot be read as a placement plan .ValueError",
        ),
        (lambda d: d["layers"]["3"].update(ranks=[0, 0, 0, 1, 1, 2]), r"layer 3: .*\[3, 2, 1\]"),
        (
            lambda d: d["layers"]["3"].update(ranks=[0, 0, 1, 1, 2, 5]),
            "layer 3: expected 2 experts",
        ),
        (lambda d: d.update(layers={}), "cannot be read"),
        (lambda d: d["layers"].update(x=d["layers"]["3"]), "cannot be read"),
    ],
)
def test_damaged_plans(tmp_path, change, message):
    path = tmp_path / "plan.json"
    plan().write(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as error:
        PlacementPlan.read(path)
    assert "plan.json" in str(error.value)


def test_plans_must_be_balanced():
    with pytest.raises(DataError, match="layer 1: expected 3 experts on each of 2 ranks"):
        PlacementPlan.of("olmoe", (1,), 2, [[0, 0, 0, 0, 1, 1]])
    with pytest.raises(ValueError, match=r"ranks_LE: got shape \(1, 6\), expected \(2, E\)"):
        PlacementPlan.of("olmoe", (1, 2), 2, [[0, 0, 0, 1, 1, 1]])


def test_simulation_against_loop():
    index, seq = topical(tokens=90, layers=3, experts=6)
    home = seq % 3
    at_home, sent = 0, 0
    for t in range(90):
        for layer in range(3):
            places = [RANKS[layer, e] for e in index[t, layer]]
            at_home += places.count(home[t])
            sent += len(set(places) - {home[t]})
    found = simulate_placement(index, RANKS, home, hidden_size=40, bytes_per_element=4)
    assert found["home_share"] == pytest.approx(at_home / (90 * 3 * 3))
    assert found["all_to_all_bytes"] == pytest.approx(2 * 40 * 4 * sent / 90)
    assert placement_metrics(index, RANKS).items() <= found.items()


def test_baselines():
    made = baseline_placements(2, 6, 3, seed=1)
    assert made["index_order"].tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert made["round_robin"].tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert [np.bincount(row).tolist() for row in made["random"]] == [[2, 2, 2]] * 2
    assert not np.array_equal(made["random"], baseline_placements(2, 6, 3, seed=2)["random"])


def test_comparison_table():
    index, seq = topical(tokens=90, layers=3, experts=6)
    table = compare_placements(index, seq + 7, RANKS, hidden_size=40)
    assert list(table) == ["index_order", "round_robin", "random", "planned"]
    assert table["planned"] == simulate_placement(index, RANKS, seq % 3, 40)


def test_bucketing_by_hand():
    # First layer: sequences 4 and 7 use rank 1, sequence 9 rank 0; the second layer is the reverse.
    ranks = np.array([[0, 0, 1, 1], [1, 1, 0, 0]])
    index = np.array([[[2, 3], [2, 0]], [[2, 3], [2, 3]], [[0, 1], [0, 1]]])
    found = bucket_sequences(index, [4, 7, 9], ranks, slack=1.4)
    assert found.sequences.tolist() == [4, 7, 9]
    assert found.home_S.tolist() == [1, 1, 0]
    assert found.tokens_R.tolist() == [1, 2]
    assert found.first_layer_before == pytest.approx((0 + 2 + 2) / 6)  # homes 0, 1, 0
    assert found.first_layer_after == 1.0
    assert found.share_before == pytest.approx((0 + 1 + 2 + 0 + 2 + 0) / 12)
    assert found.share_after == pytest.approx((2 + 1 + 2 + 0 + 2 + 0) / 12)


def test_bucketing_keeps_the_balance():
    index, seq = topical(tokens=17 * 40, layers=2, experts=6, sharpness=3.0)
    ranks = RANKS[:2]
    found = bucket_sequences(index, seq, ranks, slack=1.1)
    assert found.tokens_R.sum() == len(seq)
    assert found.tokens_R.max() <= 1.1 * len(seq) / 3
    free = bucket_sequences(index, seq, ranks, slack=3.0)
    assert found.first_layer_before < found.first_layer_after <= free.first_layer_after
    best = [
        np.bincount(ranks[0][index[seq == number, 0]].ravel(), minlength=3).argmax()
        for number in range(40)
    ]
    assert free.home_S.tolist() == best


def test_a_sequence_that_fits_nowhere_goes_to_the_emptiest_rank():
    index = np.array([[[0]], [[0]], [[0]], [[0]], [[1]]])
    found = bucket_sequences(index, [0, 0, 0, 0, 1], np.array([[0, 1]]), slack=1.0)
    assert found.home_S.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"slack: got 0\.5"):
        bucket_sequences(index, [0, 0, 0, 0, 1], np.array([[0, 1]]), slack=0.5)
