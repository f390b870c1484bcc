"""A collapse is named: a router's once, with what to change; a model's, which ends the run."""

import math
from types import SimpleNamespace

import pytest
import torch

from moe_finetune import SpecializationCallback
from moe_finetune.errors import NumericsError
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.numerics import CollapseWatch, NumericsGuard
from tests import tiny
from tests.training.cases import guarded

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


def run(folder, learning_rate, lora, **options):
    torch.manual_seed(1)
    section = LoraSection(rank=4, alpha=8.0) if lora else None
    model = add_lora(tiny.model("qwen3_moe", num_hidden_layers=2), section, "full")
    options = {"max_steps": 14, "save_steps": 2, "learning_rate": learning_rate, **options}
    callback = SpecializationCallback("none")
    trainer = guarded(folder, model, callback, **options)
    try:
        trainer.train()
    finally:
        callback.close()
    return trainer.state


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_has_run_away_stops_the_run(tmp_path, lora):
    with pytest.raises(NumericsError, match=r"training has collapsed.*learning_rate") as caught:
        run(tmp_path, 1e3, lora)
    found = str(caught.value)
    step = int(found.partition(":")[0].removeprefix("step "))
    assert step < 13 and f"loss has been {math.log(tiny.VOCABULARY):.4g}" in found
    assert (tmp_path / "bad_batches.jsonl").is_file()
    good = int(found.rpartition("checkpoint-")[2]) if "checkpoint-" in found else 0
    assert good <= step - 5


def test_training_that_learns_is_left_alone(tmp_path):
    state = run(tmp_path, 3e-3, True, logging_steps=1)
    assert state.global_step == 14
    assert state.log_history[-2]["loss"] < state.log_history[0]["loss"]


def judged(tmp_path, steps):
    """The guard's verdicts on steps of (loss, gradient norm), two micro-batches each."""
    facts = SimpleNamespace(vocab_size=1000)
    recorder = SimpleNamespace(add_observer=lambda observer: None)
    work = SimpleNamespace(objective=SimpleNamespace(facts=facts), recorder=recorder)
    guard = NumericsGuard(tmp_path, "stop", SimpleNamespace(specialization=work))
    for number, (loss, norm) in enumerate(steps, start=1):
        guard.on_step_begin(None, None, None)
        for part in (0.25, 0.75):
            guard.batch({}, torch.tensor(loss * part))
        guard.leaves_out(torch.nn.Identity(), number, norm)


GUESS = math.log(1000)


@pytest.mark.parametrize(
    "steps",
    [
        [(2.1, 3.0)] + [(GUESS, 1e7)] * 4 + [(5.0, 1.0)] + [(GUESS, 1e7)] * 4,  # not in a row
        [(GUESS, 3.0)] * 30,  # a fresh model has not learned yet
        [(2.1, 3.0)] + [(0.001, 0.0)] * 30,  # nothing left to learn
        [(2.1, 3.0)] + [(2.0, 1e-4)] * 30,  # small is not nothing
        [(0.0, 2.0)] * 30,  # a trainer that gives the language model no weight
    ],
)
def test_what_is_no_collapse(tmp_path, steps):
    judged(tmp_path, steps)


@pytest.mark.parametrize("end", [(GUESS, 1e7), (30.0, 2.0), (2.0, 0.0), (1.2, 1e-6)])
def test_what_is_one(tmp_path, end):
    with pytest.raises(NumericsError, match=r"^step 7: training has collapsed: the loss has been"):
        judged(tmp_path, [(2.1, 3.0), (1.9, 2.0)] + [end] * 5)
