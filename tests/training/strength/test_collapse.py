"""A collapsed router is named once, with what to change."""

from types import SimpleNamespace

import torch
from transformers import Trainer

from moe_finetune import SpecializationCallback
from moe_finetune.training.callback.early_ends import CollapseWatch
from tests.support import tiny
from tests.training.cases import arguments, collate, rows

EXPERTS, TOP_K, LAYERS = 12, 3, 2


def watch(load_E):
    load_LE = torch.stack([torch.full((EXPERTS,), 50), load_E])
    work = SimpleNamespace(
        objective=SimpleNamespace(facts=SimpleNamespace(num_experts=EXPERTS, top_k=TOP_K)),
        statistics=SimpleNamespace(last_load_LE=load_LE),
    )
    return CollapseWatch(SimpleNamespace(specialization=work))


def log(seen, caplog, times, violation, dead):
    state = SimpleNamespace(global_step=7, is_world_process_zero=True)
    logs = {"routing/max_violation_worst_layer": violation, "routing/dead_experts": dead}
    for _ in range(times):
        seen.on_log(None, state, None, logs=dict(logs))
    return [r.message for r in caplog.records if "collapsed" in r.message]


def test_warns_once_after_five_logs(caplog):
    seen = watch(torch.full((EXPERTS,), 50))
    assert log(seen, caplog, 4, 2.9, 0.0) == []  # the limit is 0.75 * (12 / 3 - 1) = 2.25
    assert log(seen, caplog, 1, 2.0, 0.0) == []  # recovered: counting starts again
    assert log(seen, caplog, 4, 2.9, 0.0) == []
    (message,) = log(seen, caplog, 4, 2.9, 0.0)
    assert "MaxVio 2.90 (limit 2.25)" in message
    remedies = ("load_balance.weight", "bias_update", "learning_rate", "router.train: frozen")
    assert all(remedy in message for remedy in remedies)


def test_dead_experts(caplog):
    full = torch.full((EXPERTS,), 50)
    assert log(watch(full), caplog, 5, 1.0, 0.5 * EXPERTS) == []
    assert len(log(watch(full), caplog, 5, 1.0, 0.5 * EXPERTS + 1)) == 1


def test_few_tokens_are_no_verdict(caplog):
    few = torch.full((EXPERTS,), 19)
    assert log(watch(few), caplog, 9, 2.9, 11.0) == []


def test_a_callback_in_another_trainer_warns(tmp_path, caplog):
    """Routers without weights choose the same experts for every token."""
    model = tiny.model("qwen3_moe")
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.zeros_(parameter)
    settings = arguments(
        tmp_path, per_device_train_batch_size=11, logging_steps=1, learning_rate=0.0
    )
    settings.max_steps = 6
    Trainer(
        model,
        settings,
        data_collator=collate,
        train_dataset=rows(22),
        callbacks=[SpecializationCallback("none")],
    ).train()
    (message,) = [r.message for r in caplog.records if "collapsed" in r.message]
    assert "for 5 logs up to step 5" in message and "router.train: frozen" in message
