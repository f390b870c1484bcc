"""Greedy determinantal choice: against brute force, its bound, whole models, what is refused."""

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from eval.effects import determinantal
from eval.effects.determinantal import determinantal_choice, greedy_choice
from moe_finetune.errors import CaptureError
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.layers import moe_layers
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny, tiny_families

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


def routed(model, *choice):
    """Logits, and what the experts of the first MoE layer were given."""
    seen, layer = [], moe_layers(model)[0]
    with torch.no_grad(), determinantal_choice(model, *choice) if choice else nullcontext():
        handle = layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
        logits = model(**tiny.batch()).logits
        handle.remove()
    return logits, seen[0]


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
    plain, (_, own_TK, _) = routed(model)
    wide, _ = routed(model, 1e9)
    assert torch.equal(wide, plain)  # top-k, bit for bit
    monkeypatch.setattr(determinantal, "WORK", 5 * 8 * 192)  # some tokens at a time
    eps, candidates = 1e-4, 8
    layer, logits_TE = moe_layers(model)[0], []
    path = layer.family.router_logits
    router = layer.router.get_submodule(path) if path else layer.router
    at = layer.family.router_returns.index("logits") if not path else None
    handle = router.register_forward_hook(
        lambda module, args, out: logits_TE.append(out if at is None else out[at])
    )
    logits, (hidden_TH, index_TK, weights_TK) = routed(model, eps, candidates)
    handle.remove()
    assert not torch.equal(logits, plain)
    scores_TE = logits_TE[0].flatten(0, -2).double().softmax(-1)
    moved, k = 0, own_TK.shape[1]
    for t in range(len(scores_TE)):
        tried = scores_TE[t].topk(candidates).indices
        x_H = hidden_TH[t : t + 1].expand(candidates, -1).contiguous()
        with torch.no_grad():  # transformers' own experts, one a row
            outputs = layer.experts(x_H, tried[:, None], torch.ones(candidates, 1))
        quality, features = scores_TE[t, tried].numpy(), outputs.double().numpy()
        taken: list[int] = []
        for _ in range(k):
            left = [i for i in range(candidates) if i not in taken]
            taken.append(max(left, key=lambda i: value(quality, features, [*taken, i], eps)))
        wanted = tried[taken]
        assert sorted(index_TK[t].tolist()) == sorted(wanted.tolist())
        moved += sorted(own_TK[t].tolist()) != sorted(wanted.tolist())
        weights = scores_TE[t, index_TK[t]]
        if name in ("qwen3_moe", "gpt_oss"):
            weights = weights / weights.sum()
        torch.testing.assert_close(weights_TK[t].double(), weights, rtol=1e-4, atol=1e-6)
    assert moved > 3
    assert torch.equal(routed(model)[0], plain)  # taken off again


def test_lora_on_the_experts_is_part_of_what_is_compared():
    section = LoraSection(rank=4, alpha=8.0, targets=["experts"])
    model = add_lora(tiny.model("qwen3_moe"), section, "frozen").eval()
    before = routed(model, 1e-4)[1][1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and ".0." in name:
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7 - 3)
    after = routed(model, 1e-4)[1][1]
    assert not torch.equal(before.sort(-1).values, after.sort(-1).values)


@pytest.mark.parametrize(
    ("name", "changes", "options", "why"),
    [
        ("deepseek_v3", {}, (), "a bias is added"),
        ("glm4_moe", {}, (), "it selects experts from groups"),
        ("phimoe", {}, (), "SparseMixer"),
        ("deepseek_v4", {}, (), "looked up by token"),
        (
            "qwen2_moe",
            {"num_experts_per_tok": 1},
            (),
            "it selects only one expert per token",
        ),
        ("qwen2_moe", {}, (1e-4, 2), "2 candidates; expected 3 to 10"),
        ("qwen2_moe", {}, (1e-4, 11), "11 candidates; expected 3 to 10"),
    ],
)
def test_routers_that_choose_otherwise_are_refused(name, changes, options, why):
    home = tiny if name in tiny.FAMILY_NAMES else tiny_families
    model = home.model(name, **changes)
    with pytest.raises(CaptureError, match=why), determinantal_choice(model, *options):
        pass
