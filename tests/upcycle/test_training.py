from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_finetune.checkpoint.loading import load_model
from moe_finetune.losses.functional import supervised_routing_loss
from moe_finetune.recipe.method import resolve_method
from moe_finetune.upcycle import merge_experts
from moe_finetune.upcycle.dense import load_dense
from moe_finetune.upcycle.frequencies import count_table
from moe_finetune.upcycle.training import Job, run_job
from tests import tiny
from tests.upcycle import dense

EXPERTS, ROWS, LENGTH, RATE = 5, 3, 11, 0.25


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    experts = [dense.save("llama", folder / str(seed), seed) for seed in range(EXPERTS)]
    merge_experts(experts, folder / "moe", router_std=0.4)
    return folder / "moe"


def test_the_router_stage_follows_supervised_routing_alone(merged, tmp_path):
    """One step of plain SGD is the gradient of the sum over layers of the paper's loss."""
    generator = np.random.default_rng(0)
    counts_EV = generator.integers(0, 5, (EXPERTS, tiny.VOCABULARY))
    table = count_table(counts_EV, np.arange(EXPERTS), EXPERTS, "t")
    table.save(tmp_path / "table.safetensors")
    rows_RS = generator.integers(4, 260, (ROWS, LENGTH)).astype(np.int32)
    trainer = {
        "max_steps": 1,
        "per_device_train_batch_size": ROWS,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
    }
    term = {"supervised_routing": {"table": str(tmp_path / "table.safetensors")}}
    method = resolve_method("supervised_routing", terms=term)
    job = Job(merged, rows_RS, trainer, 3, "float32", method=method, routers_only=True)
    run_job(job, tmp_path / "work", tmp_path / "routed")

    model = load_model(merged, dtype="float32")
    logits = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    ids_RS = torch.from_numpy(rows_RS.astype(np.int64))
    model(ids_RS)
    frequencies_VE = torch.from_numpy(table.frequencies_VN)
    sum(
        supervised_routing_loss(each, ids_RS.reshape(-1), frequencies_VE) for each in logits
    ).backward()
    trained = load_model(tmp_path / "routed", dtype="float32")
    for layer, after in zip(model.model.layers, trained.model.layers, strict=True):
        gate = layer.mlp.gate.weight
        assert gate.grad.abs().max() > 1e-3
        expected = gate.detach() - RATE * gate.grad
        torch.testing.assert_close(after.mlp.gate.weight.detach(), expected, atol=1e-6, rtol=1e-5)


def _rows(seed):
    return np.random.default_rng(seed).integers(4, 260, (24, LENGTH)).astype(np.int32)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_small_updates_add_up_in_bfloat16(merged, tmp_path, kind):
    """At 5e-5 one step is less than half a bfloat16 step of most weights; forty are not."""
    start = merged if kind == "moe" else dense.save("llama", tmp_path / "dense", 1)
    trainer = {
        "max_steps": 40,
        "per_device_train_batch_size": 2,
        "learning_rate": 5.0e-5,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
    }
    method = resolve_method("none") if kind == "moe" else None
    job = Job(start, _rows(1), trainer, 3, "bfloat16", method=method)
    run_job(job, tmp_path / "work", tmp_path / "out")
    load = load_model if kind == "moe" else load_dense
    before, after = load(start, dtype="bfloat16"), load(tmp_path / "out")
    assert after.dtype == torch.bfloat16
    name = "model.layers.1.self_attn.o_proj.weight"
    old, new = before.get_parameter(name), after.get_parameter(name)
    large = old.abs() > 0.0625  # neighbours in bfloat16 are 4.9e-4 apart there, or more
    assert large.sum() > 1000
    assert (old != new)[large].float().mean() > 0.3
