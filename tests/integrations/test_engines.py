"""Engines with MoE blocks of their own: the examples in recipes/engines, on real packages.

``make test-integrations`` installs them; without that the tests are skipped.
"""

import os

import pytest

from tests.conftest import ROOT
from tests.integrations.environments import environment_of, python
from tests.support.ranks import run_ranks

ENGINES = ROOT / "recipes" / "engines"
AUTOMODEL = """
import torch
from nemo_automodel.components.moe.config import MoEConfig
from moe_finetune.losses.functional import router_z_loss, variance_loss
from moe_finetune.losses.record import RoutingRecord

config = MoEConfig(
    n_routed_experts=9, n_shared_experts=0, n_activated_experts=3, n_expert_groups=1,
    n_limited_groups=1, train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0,
    score_func="softmax", route_scale=1.0, dim=14, inter_dim=22, moe_inter_dim=22,
    norm_topk_prob=True, softmax_before_topk=True, dtype=torch.float32)
torch.manual_seed(3)
gate = Gate(config).train()
with torch.no_grad():
    gate.weight.normal_()
x_TH, valid_T = torch.randn(17, 14), torch.arange(17) < 13
def loss_of(record):
    z_loss = 0.3 * router_z_loss(record.logits_TE, record.mask_T)
    return z_loss + 0.7 * variance_loss(record.scores_TE, record.mask_T)

handle = add_losses(gate, 2, loss_of)
(0 * gate(x_TH, valid_T, None)[0].sum()).backward()
gradient, gate.weight.grad = gate.weight.grad, None
handle.remove()

logits_TE = x_TH @ gate.weight.T
chosen_TE = logits_TE.softmax(-1)
top_TK = chosen_TE.topk(3).indices
kept_TE = torch.zeros_like(chosen_TE).scatter(1, top_TK, chosen_TE.gather(1, top_TK))
scores_TE = (kept_TE / kept_TE.sum(1, keepdim=True))[valid_T]
loss = 0.3 * logits_TE[valid_T].logsumexp(1).square().mean()
loss = loss - 0.7 * (scores_TE - scores_TE.mean(0)).square().mean()
loss.backward()
torch.testing.assert_close(gradient, gate.weight.grad, rtol=1e-4, atol=1e-6)
assert gradient.abs().max() > 1e-3
"""


@pytest.mark.slow
def test_torchtitan_blocks_under_fsdp2_have_our_losses_and_gradients(monkeypatch):
    packages = environment_of("torchtitan")
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{ROOT}")
    run_ranks("tests.integrations.torchtitan_worker", 2, ENGINES / "torchtitan.py")


@pytest.mark.slow
def test_automodels_gate_has_the_gradient_of_its_losses():
    done = python(
        environment_of("automodel"),
        ["-c", (ENGINES / "automodel.py").read_text() + AUTOMODEL],
        ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_sketch_for_megatron_is_a_router_of_the_installed_package():
    check = """
import inspect
assert list(inspect.signature(TopKRouter.forward).parameters) == ["self", "input", "padding_mask"]
from megatron.core.transformer.moe.moe_layer import MoESubmodules
assert MoESubmodules(router=RouterWithLosses).router is RouterWithLosses
"""
    done = python(
        environment_of("megatron"), ["-c", (ENGINES / "megatron.py").read_text() + check], ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
