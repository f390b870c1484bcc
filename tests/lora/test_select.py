import json

import numpy as np
import pytest
import torch

from moe_finetune.errors import DataError
from moe_finetune.lora.select import ExpertSelection, expert_relevance, select_experts


def routed(seed: int = 0, tokens: int = 31, layers: int = 2, experts: int = 7, width: int = 3):
    rng = np.random.default_rng(seed)
    index = np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :width]
    return index, rng.random((tokens, layers, width))


@pytest.mark.parametrize("score", ["token", "gate"])
def test_relevance_and_selection_against_loop(score):
    index, weights = routed()
    relevance = expert_relevance(index, weights, 7, score)
    chosen = select_experts(torch.from_numpy(index), torch.from_numpy(weights), 7, score, 0.45)
    for layer in range(2):
        sums = [0.0] * 7
        for t in range(31):
            for k in range(3):
                value = 1.0 if score == "token" else weights[t, layer, k]
                sums[index[t, layer, k]] += value
        wanted = [value / sum(sums) for value in sums]
        assert relevance[layer] == pytest.approx(wanted)
        reached, picked = 0.0, []
        for expert in sorted(range(7), key=lambda e: (-wanted[e], e)):
            if reached >= 0.45:
                break
            picked.append(expert)
            reached += wanted[expert]
        assert chosen[layer] == picked
    assert chosen != select_experts(index[:, ::-1], weights[:, ::-1], 7, score, 0.45)


def test_ties_go_to_the_lower_index_and_sums_are_exact():
    index = np.array([[[3]], [[1]], [[0]], [[2]], [[4]]])
    assert select_experts(index, None, 6, top_p=0.6) == [[0, 1, 2]]
    assert select_experts(index, None, 6, top_p=0.61) == [[0, 1, 2, 3]]
    assert select_experts(index, None, 6, top_p=1.0) == [[0, 1, 2, 3, 4]]  # never the unused 5


def test_scores_differ():
    index = np.array([[[0, 1]], [[0, 2]]])
    weights = np.array([[[0.1, 0.9]], [[0.1, 0.2]]])
    assert select_experts(index, weights, 3, "token", 0.3) == [[0]]
    assert select_experts(index, weights, 3, "gate", 0.3) == [[1]]


@pytest.mark.parametrize(("task", "equal"), [("law", 26), ("intent", 25)])
def test_published_selections(data_file, task, equal):
    trace = np.load(data_file(f"deepseek_v2_lite_routing_{task}.npz"), allow_pickle=False)
    published = ExpertSelection.read(data_file(f"esft_expert_config_{task}.json"))
    chosen = select_experts(trace["ids"], trace["weights"], 64, "token", 0.2)
    assert sorted(published.experts) == list(range(1, 27))
    same = [set(ids) == set(published.experts[layer + 1]) for layer, ids in enumerate(chosen)]
    assert sum(same) == equal


def test_wrong_arguments():
    index, weights = routed()
    with pytest.raises(ValueError, match=r"index_TLK: got shape \(31, 3\), expected \(T, L, K\)"):
        select_experts(index[:, 0], weights, 7)
    with pytest.raises(ValueError, match=r"weights_TLK: got shape \(30, 2, 3\)"):
        select_experts(index, weights[1:], 7, "gate")
    with pytest.raises(ValueError, match="score: got 'both'"):
        select_experts(index, weights, 7, "both")
    with pytest.raises(ValueError, match="top_p: got 0"):
        select_experts(index, weights, 7, top_p=0)
    with pytest.raises(ValueError, match="got values from 0 to 6, expected 0 to 4"):
        select_experts(index, weights, 5)
    with pytest.raises(ValueError, match="weights_TLK: got None"):
        select_experts(index, None, 7, "gate")


def test_file_round_trip(tmp_path):
    path = tmp_path / "selection.json"
    made = ExpertSelection({10: [3, 1], 2: [5]}, "olmoe", 7, "gate", 0.3)
    made.write(path)
    assert list(json.loads(path.read_text())["experts"]) == ["2", "10"]
    assert ExpertSelection.read(path) == made
    made.check("olmoe", range(16), 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a selection file"),
        ('{"experts": {"one": [1]}}', "'one' is not the number"),
        ('{"experts": {"1": []}}', "experts.1: List should have at least 1"),
        ('{"experts": {"1": [true]}}', r"experts.1.0: Input should be a valid integer"),
        ('{"experts": {"1": [0], "1": [1]}}', "occurs twice"),
        ('{"experts": {"1": [0], "01": [1]}}', "not the number"),
        ('{"experts": {"1": [2, 2]}}', "listed twice"),
        ('{"experts": {"1": [7]}, "num_experts": 7}', "id 7 does not exist"),
        (
            '{"experts": {"1": [1]}, "num_experts": "7"}',
            "num_experts: Input should be",
        ),
        ('{"experts": {"1": [1]}, "shared_experts": true}', "shared_experts is true"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    path = tmp_path / "selection.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as error:
        ExpertSelection.read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (("mixtral", range(16), 7), "made for model type 'olmoe'"),
        (("olmoe", range(16), 8), "made for 7 experts"),
        (("olmoe", range(9), 7), r"layers \[10\] are not MoE layers"),
    ],
)
def test_selection_of_another_model(facts, message):
    with pytest.raises(DataError, match=message):
        ExpertSelection({10: [3, 1], 2: [5]}, "olmoe", 7).check(*facts)


def test_selection_without_facts_is_checked_by_its_ids():
    with pytest.raises(DataError, match="layer 2 names expert 5"):
        ExpertSelection({2: [5]}).check("olmoe", range(3), 5)
