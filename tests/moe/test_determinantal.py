"""Greedy determinantal choice: against brute force, its bound, whole models, what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch

from moe_finetune.errors import CaptureError, EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe import determinantal
from moe_finetune.moe.determinantal import Determinantal, DeterminantalChoice, greedy_choice
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import moe_layers
from moe_finetune.recipe.sections import LoraSection
from tests import tiny, tiny_families

T, N, H = 23, 7, 4


def tokens(seed=0, crowd=0.0):
    """Scores and features; ``crowd`` draws the features towards one direction."""
    rng = np.random.default_rng(seed)
    features_TNH = rng.standard_normal((T, N, H)) + crowd * rng.standard_normal((T, 1, H))
    features_TNH *= rng.uniform(0.2, 5, (T, N, 1))
    return rng.dirichlet(np.ones(N), T), features_TNH


def value(quality_N, features_NH, subset, eps):
    """``log det(I + L_S / eps)`` of one token, from the formula."""
    chosen = list(subset)
    unit = features_NH[chosen] / np.linalg.norm(features_NH[chosen], axis=1, keepdims=True)
    kernel = (unit @ unit.T) * np.outer(quality_N[chosen], quality_N[chosen])
    return np.linalg.slogdet(np.eye(len(chosen)) + kernel / eps)[1]


def chosen_by(quality, features, k, eps):
    return greedy_choice(torch.from_numpy(quality), torch.from_numpy(features), k, eps).numpy()


@pytest.mark.parametrize(("k", "eps"), [(1, 1e-2), (3, 1e-4), (3, 1e-2), (5, 1e-3), (N, 1e-1)])
def test_the_choice_is_greedy_by_brute_force(k, eps):
    quality, features = tokens(1, crowd=1.5)
    found = chosen_by(quality, features, k, eps)
    for t in range(T):
        taken: list[int] = []
        for _ in range(k):
            left = [i for i in range(N) if i not in taken]
            taken.append(max(left, key=lambda i: value(quality[t], features[t], [*taken, i], eps)))
        assert found[t].tolist() == taken
    if 1 < k < N:
        by_score = np.argsort(-quality, axis=1)[:, :k]
        assert (np.sort(found, 1) != np.sort(by_score, 1)).any(1).mean() > 0.1


@pytest.mark.parametrize("eps", [1e-4, 1e-2, 1.0])
def test_its_value_is_within_the_bound_of_the_best_of_all_sets(eps):
    k, shares, better = 3, [], 0
    for seed in range(4):
        quality, features = tokens(seed, crowd=2.0)
        found = chosen_by(quality, features, k, eps)
        for t in range(T):
            sets = itertools.combinations(range(N), k)
            best = max(value(quality[t], features[t], subset, eps) for subset in sets)
            own = value(quality[t], features[t], found[t], eps)
            by_score = value(quality[t], features[t], np.argsort(-quality[t])[:k], eps)
            shares.append(own / best)
            better += own > by_score + 1e-12
            # Adding an expert never lowers the objective, which the bound rests on.
            assert value(quality[t], features[t], found[t][:2], eps) < own
    assert 1 - 1 / math.e <= min(shares)
    assert max(shares) <= 1 + 1e-12
    assert better > 20 or eps == 1.0  # top-k is often worse, but for a large eps


def test_a_copy_of_what_is_chosen_waits_for_the_rest():
    features = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2]][None]
    quality = torch.tensor([[0.5, 0.45, 0.03, 0.02]], dtype=torch.float64)
    assert greedy_choice(quality, features, 3, 1e-5).tolist() == [[0, 2, 3]]
    assert greedy_choice(quality, features, 3, 10.0).tolist() == [[0, 1, 2]]
    features[0, 2] = 0  # a zero output has cosine 0 with anything
    assert greedy_choice(quality, features, 3, 1e-5).tolist() == [[0, 2, 3]]


def routed(model, perturbation=None, ids=None):
    seen = []
    ids = tiny.batch()["input_ids"] if ids is None else ids
    with torch.no_grad(), Recorder(
        model,
        observers=[lambda record, _: seen.append(record)],
        needs=frozenset({"outputs"}),
        observe="all",
        perturbation=perturbation,
    ):  # fmt: skip
        return model(input_ids=ids).logits, seen


def crowded(model):
    """Make the model's experts near copies of each other, in groups of three."""
    with torch.no_grad():
        for layer in moe_layers(model):
            for stack in (layer.experts.gate_up_proj, layer.experts.down_proj):
                for e in range(stack.shape[0]):
                    stack[e] = 0.15 * stack[e] + stack[e - e % 3]
    return model


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss"])
def test_a_model_chooses_as_a_slow_loop_over_its_experts(name, monkeypatch):
    model = crowded((tiny if name in tiny.FAMILY_NAMES else tiny_families).model(name))
    plain, own = routed(model)
    wide, _ = routed(model, DeterminantalChoice(Determinantal(1e9)))
    assert torch.equal(wide, plain)  # top-k, bit for bit
    monkeypatch.setattr(determinantal, "WORK", 5 * 8 * 192)  # some tokens at a time
    eps, candidates = 1e-4, 8
    logits, seen = routed(model, DeterminantalChoice(Determinantal(eps, candidates)))
    assert not torch.equal(logits, plain)
    layer, record, k = moe_layers(model)[0], seen[0], own[0].index_TK.shape[1]
    scores_TE = record.logits_TE.double().softmax(-1)
    torch.testing.assert_close(record.logits_TE, own[0].logits_TE)
    moved = 0
    for t in range(len(scores_TE)):
        tried = scores_TE[t].topk(candidates).indices
        x_H = record.inputs_TH[t : t + 1].expand(candidates, -1).contiguous()
        with torch.no_grad():  # transformers' own experts, one a row
            outputs = layer.experts(x_H, tried[:, None], torch.ones(candidates, 1))
        quality, features = scores_TE[t, tried].numpy(), outputs.double().numpy()
        taken: list[int] = []
        for _ in range(k):
            left = [i for i in range(candidates) if i not in taken]
            taken.append(max(left, key=lambda i: value(quality, features, [*taken, i], eps)))
        wanted = tried[taken]
        assert sorted(record.index_TK[t].tolist()) == sorted(wanted.tolist())
        moved += sorted(own[0].index_TK[t].tolist()) != sorted(wanted.tolist())
        weights = scores_TE[t, record.index_TK[t]]
        if name in ("qwen3_moe", "gpt_oss"):
            weights = weights / weights.sum()
        torch.testing.assert_close(record.weights_TK[t].double(), weights, rtol=1e-4, atol=1e-6)
    assert moved > 3
    assert torch.equal(routed(model)[0], plain)  # taken off again


def test_lora_on_the_experts_is_part_of_what_is_compared():
    section = LoraSection(rank=4, alpha=8.0, targets=["experts"])
    model = add_lora(tiny.model("qwen3_moe"), section, "frozen").eval()
    before = routed(model, DeterminantalChoice(Determinantal(1e-4)))[1][0].index_TK
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and ".0." in name:
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7 - 3)
    after = routed(model, DeterminantalChoice(Determinantal(1e-4)))[1][0].index_TK
    assert not torch.equal(before.sort(-1).values, after.sort(-1).values)


@pytest.mark.parametrize(
    ("name", "changes", "options", "why"),
    [
        ("deepseek_v3", {}, Determinantal(), "a bias that may be negative is added"),
        ("glm4_moe", {}, Determinantal(), "from 1 of 2 groups"),
        ("phimoe", {}, Determinantal(), "SparseMixer"),
        ("deepseek_v4", {}, Determinantal(), "looked up by token"),
        (
            "qwen2_moe",
            {"num_experts_per_tok": 1},
            Determinantal(),
            "it selects only one expert per token, so no two",
        ),
        ("qwen2_moe", {}, Determinantal(1e-4, 2), "2 candidates; expected 3 to 10"),
        ("qwen2_moe", {}, Determinantal(1e-4, 11), "11 candidates; expected 3 to 10"),
    ],
)
def test_routers_that_choose_otherwise_are_refused(name, changes, options, why):
    home = tiny if name in tiny.FAMILY_NAMES else tiny_families
    model = home.model(name, **changes)
    recorder = Recorder(model, perturbation=DeterminantalChoice(options))
    with pytest.raises(CaptureError, match=why):
        recorder.install()
    assert not recorder.installed


def test_an_evaluation_says_that_it_chose_so(tiny_checkpoint):
    base, ids = tiny_checkpoint("qwen3_moe"), tiny.batch()["input_ids"]
    with open_backend(base, determinantal=1e-4, candidates=9, batch_size=2) as opened:
        assert opened.kind == "hf"
        assert opened.settings["determinantal"] == {"eps": 1e-4, "candidates": 9}
        model = crowded(opened.lm.model)
        found = model(input_ids=ids).logits
    plain, _ = routed(model, None, ids)  # closing gives the router its choice back
    wanted, _ = routed(model, DeterminantalChoice(Determinantal(1e-4, 9)), ids)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, plain)


def test_what_cannot_choose_so_is_refused(tiny_checkpoint):
    base = tiny_checkpoint("qwen3_moe")
    for options, why in (
        ({"backend": "vllm", "determinantal": 1e-4}, "needs backend 'hf'"),
        ({"determinantal": 0.0}, "it must be more than 0"),
        ({"candidates": 4}, "only valid with the determinantal"),
    ):
        with pytest.raises(EvaluationError, match=why):
            open_backend(base, **options)
