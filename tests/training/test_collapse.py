"""A router that stays collapsed is named once, with what to change."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from moe_finetune.training.numerics import CollapseWatch

EXPERTS, TOP_K, LAYERS = 12, 3, 2


def watch(load_E, **options):
    load_LE = torch.stack([torch.full((EXPERTS,), 50), load_E])
    work = SimpleNamespace(
        objective=SimpleNamespace(facts=SimpleNamespace(num_experts=EXPERTS, top_k=TOP_K)),
        statistics=SimpleNamespace(last_load_LE=load_LE),
    )
    return CollapseWatch(SimpleNamespace(specialization=work), **options)


def log(seen, caplog, times, violation, dead):
    state = SimpleNamespace(global_step=7, is_world_process_zero=True)
    logs = {"routing/max_violation_worst_layer": violation, "routing/dead_experts": dead}
    for _ in range(times):
        seen.on_log(None, state, None, logs=dict(logs))
    return [r.message for r in caplog.records if "collapsed" in r.message]


def test_warns_once_after_patience(caplog):
    full = torch.full((EXPERTS,), 50)
    seen = watch(full, patience=3)
    assert log(seen, caplog, 2, 2.9, 0.0) == []  # the limit is 0.75 * (12 / 3 - 1) = 2.25
    assert log(seen, caplog, 1, 2.0, 0.0) == []  # recovered: counting starts again
    assert log(seen, caplog, 2, 2.9, 0.0) == []
    (message,) = log(seen, caplog, 4, 2.9, 0.0)
    assert "MaxVio 2.90 (limit 2.25)" in message and "load_balance.weight" in message


def test_dead_experts_and_given_limits(caplog):
    full = torch.full((EXPERTS,), 50)
    assert log(watch(full, patience=1), caplog, 1, 1.0, 0.5 * EXPERTS) == []
    assert len(log(watch(full, patience=1), caplog, 1, 1.0, 0.5 * EXPERTS + 1)) == 1
    assert len(log(watch(full, patience=1, max_violation=0.9), caplog, 1, 1.0, 0)) == 2


def test_few_tokens_are_no_verdict(caplog):
    few = torch.full((EXPERTS,), 19)
    assert log(watch(few, patience=1), caplog, 5, 2.9, 11.0) == []
