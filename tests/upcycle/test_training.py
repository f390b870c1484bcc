import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.functional import supervised_routing_loss
from moe_finetune.moe.layers import backbone_of
from moe_finetune.recipe.method import resolve_method
from moe_finetune.upcycle import merge_experts
from moe_finetune.upcycle.dense_parents import load_dense
from moe_finetune.upcycle.frequencies import count_table
from moe_finetune.upcycle.training import Job, build, run_job
from tests.support import tiny
from tests.upcycle import dense

EXPERTS, ROWS, LENGTH, RATE = 5, 3, 11, 0.25


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    experts = [dense.save("llama", folder / str(seed), seed) for seed in range(EXPERTS)]
    merge_experts(experts, folder / "moe", router_std=0.4)
    return folder / "moe"


@pytest.mark.parametrize(("batch", "checkpointing"), [(ROWS, False), (1, True)])
def test_the_router_stage_follows_supervised_routing_alone(merged, tmp_path, batch, checkpointing):
    """One step of plain SGD is the gradient of the sum over layers of the paper's loss."""
    generator = np.random.default_rng(0)
    counts_EV = generator.integers(0, 5, (EXPERTS, tiny.VOCABULARY))
    table = count_table(counts_EV, np.arange(EXPERTS), EXPERTS, "t")
    table.save(tmp_path / "table.safetensors")
    rows_RS = generator.integers(4, 260, (ROWS, LENGTH))
    rows = Dataset.from_dict({"input_ids": rows_RS.tolist()})
    trainer = {
        "max_steps": 1,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": ROWS // batch,
        "gradient_checkpointing": checkpointing,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
    }
    term = {"supervised_routing": {"table": str(tmp_path / "table.safetensors")}}
    method = resolve_method("supervised_routing", terms=term)
    job = Job(merged, rows, trainer, 3, "float32", method=method, routers_only=True)
    curve = tmp_path / "curve.jsonl"
    run_job(job, tmp_path / "work", tmp_path / "routed", curve)

    model = load_model(merged, dtype="float32")
    logits = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    ids_RS = torch.from_numpy(rows_RS)
    model(ids_RS)
    frequencies_VE = torch.from_numpy(table.frequencies_VN)
    loss = sum(supervised_routing_loss(each, ids_RS.reshape(-1), frequencies_VE) for each in logits)
    loss.backward()
    logged = json.loads(curve.read_text().splitlines()[0])["loss"]
    assert logged == pytest.approx(loss.item(), rel=1e-3)
    trained = load_model(tmp_path / "routed", dtype="float32")
    for layer, after in zip(model.model.layers, trained.model.layers, strict=True):
        gate = layer.mlp.gate.weight
        assert gate.grad.abs().max() > 1e-3
        expected = gate.detach() - RATE * gate.grad
        torch.testing.assert_close(after.mlp.gate.weight.detach(), expected, atol=1e-6, rtol=1e-5)


def test_the_head_is_not_computed_for_the_routers(merged, tmp_path):
    """Nothing above the last router is part of the stage: a head of NaN changes nothing."""
    counts_EV = np.random.default_rng(2).integers(1, 5, (EXPERTS, tiny.VOCABULARY))
    count_table(counts_EV, np.arange(EXPERTS), EXPERTS, "t").save(tmp_path / "table.safetensors")
    term = {"supervised_routing": {"table": str(tmp_path / "table.safetensors")}}
    method = resolve_method("supervised_routing", terms=term, strength={"first": False})
    job = Job(merged, _rows(4), {"max_steps": 3}, 3, "float32", method=method, routers_only=True)
    model = add_lora(load_model(merged, dtype="float32"), job.recipe.lora, "full")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
        backbone_of(model).norm.weight.fill_(float("nan"))
    (tmp_path / "work").mkdir()
    trainer, close = build(job, job.recipe, model, tiny.tokenizer(), tmp_path / "work")
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(1))
    trainer.train()
    close()
    assert len(seen) <= 1  # the check before training that the loss reaches the routers
    gates = [p for name, p in model.named_parameters() if p.requires_grad]
    assert gates and all(gate.isfinite().all() for gate in gates)


def test_routers_have_a_learning_rate_of_their_own(merged, tmp_path):
    """One step of plain SGD: the routers move ten times as far as at the trainer's rate."""
    trainer = {
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    before, after = load_model(merged, dtype="float32").state_dict(), {}
    for rate in (None, 0.1):
        job = Job(
            merged,
            _rows(2),
            trainer,
            3,
            "float32",
            method=resolve_method("none"),
            router_learning_rate=rate,
        )
        run_job(job, tmp_path / f"work{rate}", tmp_path / f"out{rate}")
        after[rate] = load_model(tmp_path / f"out{rate}", dtype="float32").state_dict()
    for name, weight in before.items():
        steps = [after[rate][name] - weight for rate in (None, 0.1)]
        factor = 10 if name.endswith("mlp.gate.weight") else 1
        assert factor == 1 or steps[0].abs().max() > 1e-5
        torch.testing.assert_close(steps[1], factor * steps[0], atol=2e-6, rtol=1e-3)


def _rows(seed):
    rows_RS = np.random.default_rng(seed).integers(4, 260, (24, LENGTH))
    return Dataset.from_dict({"input_ids": rows_RS.tolist()})


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
