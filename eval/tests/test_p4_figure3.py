"""Figure 3's stack of models against one model at a time, written from the formulas."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from eval.effects.p4_figure3 import (
    Setting,
    fold_rows,
    make_data,
    measure,
    pair_cosines,
    run,
)
from eval.effects.p4_models import Routed, StackedMixtures, training_loss

ARMS = ("baseline", "orthogonality", "dpp", "ncl")
M, T, F, C, E, D, K = 2, 13, 9, 5, 6, 7, 3


def _stack() -> StackedMixtures:
    return StackedMixtures(M, F, C, E, D, K, torch.Generator().manual_seed(0)).double()


class _Single(nn.Module):
    """One mixture, expert by expert and sample by sample."""

    def __init__(self, stack: StackedMixtures, m: int):
        super().__init__()
        self.router = nn.Linear(F, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(F, D, bias=False) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(D, C, bias=False) for _ in range(E))
        self.double()
        with torch.no_grad():
            self.router.weight.copy_(stack.router_MFE[m].T)
            for e in range(E):
                self.up[e].weight.copy_(stack.up_MFED[m, :, e].T)
                self.down[e].weight.copy_(stack.down_MEDC[m, e].T)

    def loss(self, inputs_TF, labels_T, arm, alpha, weight):
        probs_TE = self.router(inputs_TF).softmax(-1)
        main = diversity = 0.0
        chosen_by = [0] * E
        for t, x_F in enumerate(inputs_TF):
            best = probs_TE[t].topk(K).indices.tolist()
            outputs = [self.down[e](gelu(self.up[e](x_F))) for e in best]
            total = sum(probs_TE[t, e] for e in best)
            logits = sum(probs_TE[t, e] / total * y for e, y in zip(best, outputs, strict=True))
            main = main + cross_entropy(logits, labels_T[t]) / T
            for e in best:
                chosen_by[e] += 1
            diversity = diversity + _diversity(outputs, arm) / T
        balance = E * sum(chosen_by[e] / T * probs_TE[:, e].mean() for e in range(E))
        return main + alpha * balance + weight * diversity


def _diversity(outputs, arm):
    if arm == "baseline":
        return 0.0
    if arm == "ncl":
        shares = [y.softmax(-1) for y in outputs]
        mean = sum(shares) / K
        pairs = [(i, j) for i in range(K) for j in range(K) if i != j]
        return sum((shares[i] - mean) @ (shares[j] - mean) for i, j in pairs)
    unit = torch.stack([y / y.norm() for y in outputs])
    cosines = unit @ unit.T
    if arm == "orthogonality":
        return (cosines**2).sum() - K
    return -torch.logdet(cosines + 1e-4 * torch.eye(K, dtype=torch.float64))


@pytest.mark.parametrize("arm", ARMS)
def test_a_stack_trains_as_its_models_would_alone(arm):
    generator = torch.Generator().manual_seed(5)
    inputs_SMTF = torch.randn(3, M, T, F, generator=generator, dtype=torch.float64)
    labels_SMT = torch.randint(C, (3, M, T), generator=generator)
    stack = _stack()
    models = [_Single(stack, m) for m in range(M)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (stack, *models)]
    for inputs_MTF, labels_MT in zip(inputs_SMTF, labels_SMT, strict=True):
        loss = training_loss(stack(inputs_MTF), labels_MT, arm, 0.3, 0.2)
        losses = [
            model.loss(inputs_MTF[m], labels_MT[m], arm, 0.3, 0.2) for m, model in enumerate(models)
        ]
        # The package's losses of outputs compute in float64 when they are given it.
        torch.testing.assert_close(loss, sum(losses), rtol=1e-9, atol=0)
        for optimizer, value in zip(optimizers, (loss, *losses), strict=True):
            # An expert that no sample chose has a zero gradient in the stack, not none.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            value.backward()
            optimizer.step()
    for m, model in enumerate(models):
        up_FED = torch.stack([up.weight.T for up in model.up], 1)
        torch.testing.assert_close(stack.up_MFED[m], up_FED, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(stack.router_MFE[m], model.router.weight.T, rtol=1e-6, atol=1e-9)


def test_initial_weights_are_those_of_nn_linear():
    stack = StackedMixtures(40, F, C, E, D, K, torch.Generator().manual_seed(1))
    for values, inputs in ((stack.up_MFED, F), (stack.down_MEDC, D), (stack.router_MFE, F)):
        bound = 1 / math.sqrt(inputs)
        assert values.abs().max() <= bound
        # A uniform distribution's standard deviation is its bound over the root of 3.
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_the_data_are_the_papers_and_the_folds_are_stratified():
    setting = Setting()
    inputs_NF, labels_N = make_data(setting)
    assert inputs_NF.shape == (4000, 100)
    assert sorted(np.unique(labels_N)) == list(range(10))
    train_MN, test_MT = fold_rows(labels_N, 10, seed=1)
    assert train_MN.shape == (10, 3600) and test_MT.shape == (10, 400)
    assert sorted(test_MT.ravel()) == list(range(4000))
    for train_N, test_T in zip(train_MN, test_MT, strict=True):
        assert not set(train_N) & set(test_T)
        counts = np.bincount(labels_N[test_T])
        assert np.abs(counts - np.bincount(labels_N) / 10).max() < 1.01


def test_folds_that_cannot_be_stacked_are_refused():
    with pytest.raises(ValueError, match="do not make 4 folds"):
        fold_rows(np.arange(42) % 3, 4, seed=0)


def test_heat_maps_and_means_against_loops():
    generator = torch.Generator().manual_seed(2)
    routed: Routed = _stack()(torch.randn(M, T, F, generator=generator, dtype=torch.float64))
    labels_MT = torch.randint(C, (M, T), generator=generator)
    measured = measure(routed, labels_MT)
    hits = [
        np.mean([int(routed.logits_MTC[m, t].argmax() == labels_MT[m, t]) for t in range(T)])
        for m in range(M)
    ]
    np.testing.assert_allclose(measured["accuracy"], hits, rtol=1e-6)
    outputs_TEC = routed.outputs_MTEC[0].detach().numpy()
    for a in range(E):
        for b in range(E):
            pairs = zip(outputs_TEC[:, a], outputs_TEC[:, b], strict=True)
            mean_cosine = np.mean(
                [abs(x @ y) / np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs]
            )
            assert measured["cosines"][a][b] == pytest.approx(
                0 if a == b else mean_cosine, abs=1e-5
            )
    flat_EX = outputs_TEC.transpose(1, 0, 2).reshape(E, -1)
    shares = np.linalg.svd(flat_EX, compute_uv=False)
    shares /= shares.sum()
    assert measured["effective_rank"][0] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    for e in range(E):
        for c in range(C):
            of_class = routed.index_MTK[0][labels_MT[0] == c]
            share = (of_class == e).sum() / max(of_class.numel(), 1)
            assert measured["class_shares"][e][c] == pytest.approx(share.item(), abs=1e-5)
    for m in range(M):
        pairs = [(e, c) for row, c in zip(routed.index_MTK[m].tolist(), labels_MT[m].tolist(),
                                          strict=True) for e in row]  # fmt: skip
        information = 0.0
        for e in range(E):
            for c in range(C):
                both = pairs.count((e, c)) / len(pairs)
                marginals = [
                    sum(pair[i] == v for pair in pairs) / len(pairs) for i, v in ((0, e), (1, c))
                ]
                information += both * math.log(both / marginals[0] / marginals[1]) if both else 0.0
        assert measured["class_information"][m] == pytest.approx(information)


def test_the_determinantal_choice_replaces_top_k_alone():
    generator = torch.Generator().manual_seed(6)
    inputs_MTF = torch.randn(M, T, F, generator=generator, dtype=torch.float64)
    stack, eps, moved = _stack(), 1e-3, 0
    with torch.no_grad():
        stack.down_MEDC[:, 1::2] = stack.down_MEDC[:, ::2] * 1.1  # experts that repeat each other
        stack.up_MFED[:, :, 1::2] = stack.up_MFED[:, :, ::2]
        plain, diverse = stack(inputs_MTF), stack(inputs_MTF, eps)
    torch.testing.assert_close(diverse.outputs_MTEC, plain.outputs_MTEC)
    for m in range(M):
        for t in range(T):
            outputs_EC, probs_E = plain.outputs_MTEC[m, t], plain.probs_MTE[m, t]
            unit_EC = outputs_EC / outputs_EC.norm(dim=1, keepdim=True)
            kernel_EE = unit_EC @ unit_EC.T * probs_E.outer(probs_E) + eps * torch.eye(E)
            chosen: list[int] = []
            for _ in range(K):
                remaining = [e for e in range(E) if e not in chosen]
                subsets = [[*chosen, e] for e in remaining]
                chosen = max(subsets, key=lambda own: kernel_EE[own][:, own].det().item())
            assert diverse.index_MTK[m, t].tolist() == chosen
            moved += set(chosen) != set(plain.index_MTK[m, t].tolist())
            wanted_C = (probs_E[chosen, None] * outputs_EC[chosen]).sum(0) / probs_E[chosen].sum()
            torch.testing.assert_close(diverse.logits_MTC[m, t], wanted_C)
    assert moved > 5


def test_a_zero_output_has_cosine_zero_with_anything():
    outputs_ETC = np.ones((3, 2, 4))
    outputs_ETC[1] = 0
    np.testing.assert_allclose(pair_cosines(outputs_ETC), [[0, 0, 1], [0, 0, 0], [1, 0, 0]])


def test_arms_share_what_the_seed_decides_and_repeat():
    setting = {
        "samples": 240, "informative": 6, "redundant": 5, "classes": 4, "experts": 5, "hidden": 7,
        "folds": 3, "batch": 50, "epochs": 6, "learning_rate": 1e-2,
    }  # fmt: skip
    results = {arm: run(setting, {"loss": arm}, 1) for arm in ("baseline", "orthogonality")}
    assert np.mean(results["baseline"]["accuracy"]) > 0.4  # chance is 0.25
    for arm, result in results.items():
        for name, curve in result["curves"].items():
            assert np.shape(curve) == (7, 3), arm
            assert curve[-1] == result[name]
            assert curve[0] == results["baseline"]["curves"][name][0]  # before training arms agree
            assert curve[1] != curve[0]
        assert np.shape(result["determinantal_gain"]) == (3,)
    assert np.mean(results["orthogonality"]["pair_cosine"]) < np.mean(
        results["baseline"]["pair_cosine"]
    )
    # With weight 0 an arm's own loss drops out, and what is left is the baseline of that seed.
    without = setting | {"weight": 0.0}
    assert run(without, {"loss": "ncl"}, 1) == results["baseline"]
    assert run(without, {"loss": "ncl"}, 2) != results["baseline"]
