import json

import numpy as np
import pytest
import torch

from moe_finetune import cli
from moe_finetune.errors import DataError
from moe_finetune.lora.select import (
    ExpertSelection,
    expert_relevance,
    gained_relevance,
    kept_experts,
    reap_relevance,
    select_experts,
    top_experts,
)
from moe_finetune.routing.trace_writer import TraceWriter


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


def test_a_share_of_the_experts_is_as_many_in_each_layer():
    relevance = np.array([[0.1, 0.4, 0.1, 0.4, 0, 0, 0], [0, 0, 0, 0, 0, 1.0, 0]])
    assert top_experts(relevance, 0.25) == [[1, 3], [5, 0]]  # ties to the lower number
    assert top_experts(relevance, 0.01) == [[1], [5]]
    assert [len(ids) for ids in top_experts(np.ones((2, 100)), 0.07)] == [7, 7]
    with pytest.raises(ValueError, match="top"):
        top_experts(relevance, 0)


def test_gained_experts_are_those_whose_share_rose():
    before = np.array([[[0, 1]], [[0, 2]], [[0, 3]]])
    after = np.array([[[0, 3]], [[3, 2]], [[0, 4]]])
    assert gained_relevance(before, after, 6) == pytest.approx(np.array([[0, 0, 0, 0.5, 0.5, 0]]))
    with pytest.raises(DataError, match=r"layer 9 no expert's share rose.*router\.train: full"):
        gained_relevance(before, before, 6, layers=[9])


def traced(folder, ids_TK, tokens):
    """A trace of two MoE layers that selected the same experts."""
    ids = np.stack([ids_TK, ids_TK], axis=1)
    facts = {"model_type": "qwen3_moe", "checkpoint": "base", "layers": (1, 2), "num_experts": 6}
    with TraceWriter(folder, top_k=2, **facts) as writer:
        seq = np.zeros(len(ids), int)
        writer.append(ids, np.full(ids.shape, 0.5), seq, token_ids_T=np.asarray(tokens))
    return str(folder)


def test_the_verb_selects_a_share_and_the_experts_that_gained(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = traced(tmp_path / "before", [[0, 1], [0, 2], [0, 3]], [5, 6, 7])
    after = traced(tmp_path / "after", [[0, 3], [3, 2], [0, 4]], [5, 6, 7])
    others = traced(tmp_path / "others", [[0, 3], [3, 2], [0, 4]], [5, 6, 8])
    assert cli.main(["select", before, "--top", "30%", "--output", "hot.json"]) == 0
    hot = ExpertSelection.read("hot.json")
    assert hot.experts == {1: [0, 1], 2: [0, 1]} and hot.top == 0.3 and hot.top_p is None
    assert "67% of the token score" in capsys.readouterr().out
    gained = ["--score", "gained", "--top-p", "1", "--output"]
    assert cli.main(["select", before, after, *gained, "gained.json"]) == 0
    assert ExpertSelection.read("gained.json").experts == {1: [3, 4], 2: [3, 4]}
    for arguments, message in (
        ([before, others, *gained, "x.json"], "others: has other rows"),
        ([before, *gained, "x.json"], "BEFORE and AFTER"),
        ([before, after, "--output", "x.json"], "BEFORE and AFTER"),
        ([before, "--top", "half", "--output", "x.json"], "--top half: must be a share"),
        ([before, "--top", "1%", "--top-p", "0.2", "--output", "x.json"], "choose one"),
    ):
        assert cli.main(["select", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.json").exists()


def test_reap_is_the_mean_weighted_length_and_kept_experts_fill_every_group():
    _, weights = routed(seed=3, experts=8)
    norms = np.random.default_rng(4).random(weights.shape) * 5
    index = np.array([[[0, 1, 7], [2, 3, 4]], [[0, 5, 7], [2, 0, 1]]])
    weights, norms = weights[:2], norms[:2]
    relevance = reap_relevance(index, weights, norms, 8)
    for layer in range(2):
        means = []
        for expert in range(8):
            at = index[:, layer] == expert
            values = (weights[:, layer] * norms[:, layer])[at]
            means.append(values.mean() if len(values) else 0.0)
        assert relevance[layer] == pytest.approx(np.array(means) / sum(means))
    assert relevance[0, 6] == 0
    kept = kept_experts(np.array([[9, 8, 7, 6, 1, 3, 3, 2.0]]), 0.5, groups=2)
    assert kept == [[0, 1, 5, 6]]
    assert kept_experts(np.array([[9, 8, 7, 6, 1, 3, 3, 2.0]]), 0.3) == [[0, 1, 2]]
