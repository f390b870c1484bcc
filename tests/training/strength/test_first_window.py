"""A run's first window: its strength is measured there, and a share finds its weight."""

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from moe_finetune import SpecializationCallback, measure_strength
from moe_finetune.errors import ObjectiveError
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests.support import tiny
from tests.training.cases import PAIRS, adapted
from tests.training.gradients.grpo import trainer_for
from tests.training.gradients.policy import COMMON, Policy, explicit, gradients
from tests.training.strength.strength import BATCHES, agree, by_hand, logged, train


def test_a_trainers_first_window_is_measured_once_and_changes_nothing(tmp_path, terms):
    del terms["erc"]["noise"]
    seen = {"terms": terms, "bias_update": 0.01}
    trainer, work, batches = train(tmp_path, seen, dropout=0.1)
    unseen = {**seen, "strength": {"first": False}}
    again, other, _ = train(tmp_path, unseen, dropout=0.1)
    for (name, one), two in zip(
        trainer.model.named_parameters(), again.model.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    state = work.state_dict()
    assert state and all(torch.equal(v, other.state_dict()[k]) for k, v in state.items())
    first = logged(trainer, 1)
    assert len(first) == 6 * len(terms) and not logged(trainer, 2) and not logged(again, 1)
    assert {"losses/" + name for name in terms} <= trainer.state.log_history[0].keys()
    assert trainer.state.log_history[0]["losses/dpp"] == again.state.log_history[0]["losses/dpp"]
    assert len(batches) == 6


@pytest.mark.parametrize("mask", ["attention", "labels"])
def test_strength_under_a_trainer_is_that_of_its_window(tmp_path, terms, mask):
    trainer, _, batches = train(tmp_path, {"terms": terms, "token_mask": mask}, steps=1)
    window = [{k: b[k] for k in ("input_ids", "attention_mask", "labels")} for b in batches]
    if mask == "attention":
        wanted = by_hand(adapted(), terms, window)
    else:  # the last token of a row predicts nothing
        rows = measure_strength(adapted(), {"terms": terms, "token_mask": mask}, window)
        wanted = {row["term"]: {k: v for k, v in row.items() if "_" in k[:8]} for row in rows}
        plain = measure_strength(adapted(), {"terms": terms}, window)
        assert rows[3]["share_router"] != pytest.approx(plain[3]["share_router"], rel=1e-3)
    first = logged(trainer, 1)
    agree(
        [{"term": name} | {k: first[f"{name}/{k}"] for k in wanted[name]} for name in wanted],
        wanted,
    )


SHARED = {
    "load_balance": {"share": 0.05, "scope": "sequence"},
    "variance": {"share": 0.1, "schedule": {"kind": "linear", "warmup_steps": 4}},
    "specialization": {"share": 0.2, "every": 2},
    "erc": {"weight": 0.01, "noise": False},
}


def test_a_share_is_found_in_the_first_window_and_acts_from_the_next_step(tmp_path, caplog):
    method = {"terms": SHARED}
    trainer, work, batches = train(tmp_path, method, save_strategy="steps", save_steps=1, steps=4)
    window = [{k: b[k] for k in ("input_ids", "attention_mask", "labels")} for b in batches]
    first, third = logged(trainer, 1), logged(trainer, 3)
    found = {name: first[f"{name}/weight"] for name in SHARED}
    at_weights = {n: {**SHARED[n], "weight": found[n], "share": None} for n in SHARED}
    del at_weights["specialization"]["every"]
    rows = {r["term"]: r for r in measure_strength(adapted(), {"terms": at_weights}, window[:2])}
    assert rows["load_balance"]["share_router"] == pytest.approx(0.05, rel=1e-4)
    assert rows["variance"]["share_router"] == pytest.approx(0.1, rel=1e-4)
    assert rows["specialization"]["share_experts"] == pytest.approx(0.2, rel=1e-4)
    assert found["erc"] == 0.01
    # Found again at step 2 (0-based), on other weights and data; the others stay.
    assert third["specialization/share_experts"] == pytest.approx(0.2, rel=1e-6)
    assert third["specialization/weight"] != pytest.approx(found["specialization"], rel=1e-3)
    assert third["variance/weight"] == found["variance"]
    assert work.objective.weights["variance"] == pytest.approx(found["variance"])  # warmed up
    # The step that is measured has none of them in it.
    plain, *_ = train(tmp_path / "plain", {"terms": {"erc": SHARED["erc"]}}, steps=1)
    one_step, *_ = train(tmp_path / "one", method, steps=1)
    for (name, one), two in zip(
        plain.model.named_parameters(), one_step.model.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    # A resume goes on with what was found, and finds what is due.
    again, resumed, _ = train(
        tmp_path, method, steps=4, resume=str(tmp_path / "checkpoint-2"), save_strategy="no"
    )
    assert not logged(again, 4) and logged(again, 3).keys() == third.keys()
    for name, weight in work.objective.full_weights.items():
        assert resumed.objective.full_weights[name] == pytest.approx(weight, rel=1e-5), name
    assert resumed.objective.full_weights["variance"] == found["variance"]


def test_a_share_in_a_plain_loop_and_every_so_many_steps():
    model = adapted().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    method = {"terms": {"dpp": {"share": 0.3}, "ncl": {"share": 0.1, "every": 2}}}
    seen = []
    with Specialization(model, method) as work:
        for batch in (*BATCHES, *BATCHES):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            before = work.strength.rows
            work.step()
            if work.strength.rows is not before:
                seen.append((work.steps - 1, work.strength.rows[0].row()))
    assert [step for step, _ in seen] == [0, 2]
    weight = work.objective.full_weights["dpp"]
    assert seen[0][1]["weight"] == seen[1][1]["weight"] == weight
    assert seen[0][1]["share_experts"] == pytest.approx(0.3)
    assert seen[1][1]["share_experts"] != pytest.approx(0.3, rel=1e-3)
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_base_model().model._forward_pre_hooks


def test_deepspeed_is_refused_for_a_share_and_said_without(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with (
        pytest.raises(ObjectiveError, match=r"dpp\.share: .*DeepSpeed"),
        Specialization(adapted(), {"terms": {"dpp": {"share": 0.3}}}),
    ):
        pass
    with Specialization(adapted(), {"terms": {"dpp": {"weight": 0.3}}}):
        pass
    assert "the losses' shares are not measured: DeepSpeed" in caplog.text


def test_a_share_under_dpo_is_one_of_the_preference_losss_gradient(tmp_path):
    model = adapted()
    callback = SpecializationCallback({"terms": {"specialization": {"share": 0.2}}})
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, **COMMON),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
    )
    callback.attach(trainer)
    policy, kept = Policy(model), []
    clip = trainer.accelerator.clip_grad_norm_

    def keep(*args, **kwargs):
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        kept.append((found, len(policy.inputs)))
        return clip(*args, **kwargs)

    trainer.accelerator.clip_grad_norm_ = keep
    trainer.train()
    (preference, forwards), work = kept[0], callback.specialization
    window = policy.inputs[:forwards]  # without what is run again later
    weight = work.objective.full_weights["specialization"]
    fresh = adapted().train()
    for batch in window:
        explicit(fresh, batch, {"specialization": {"weight": weight}}, 1.0 / len(window))
    own = gradients(fresh)

    def norm(grads):
        return sum(g.double().square().sum() for n, g in grads.items() if ".experts." in n) ** 0.5

    assert float(norm(own) / norm(preference)) == pytest.approx(0.2, rel=1e-3)


def loop(work, model, factors):
    """Optimizer steps whose language loss is multiplied by each of ``factors``."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for factor in factors:
        (model(**BATCHES[0]).loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        work.step()
        yield work.objective.full_weights["dpp"]


def test_a_window_without_a_gradient_keeps_the_weight_and_a_first_one_tries_the_next(caplog):
    model = adapted().train()
    with Specialization(model, {"terms": {"dpp": {"share": 0.3, "every": 3}}}) as work:
        found = list(loop(work, model, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)))
    assert found[:2] == [None, None] and found[2] > 0
    assert found[2:6] == [found[2]] * 4 and found[6] != found[2]
    lines = [r.getMessage() for r in caplog.records if "dpp.share" in r.getMessage()]
    assert len(lines) == 2, lines
    assert "step 1: " in lines[0] and "loss has no gradient where the term acts" in lines[0]
    assert "no effect until" in lines[0]
    assert "step 4: " in lines[1] and f"its weight stays {found[2]:.3g}" in lines[1]
    # The weight is the one that the window gives by itself.
    model = adapted().train()
    with Specialization(model, {"terms": {"dpp": {"share": 0.3}}}) as fresh:
        (weight,) = loop(fresh, model, (1.0,))
    assert found[2] == pytest.approx(weight, rel=1e-6)


def test_a_share_where_neither_routers_nor_experts_train_is_an_error_at_once():
    lora = LoraSection(rank=3, alpha=6.0, targets=["attention"])
    model = add_lora(tiny.model("qwen3_moe", num_hidden_layers=2), lora, "frozen").train()
    method = {"terms": {"variance": {"share": 0.1}}}
    with pytest.raises(
        ObjectiveError, match=r"variance\.share: .* gradients are compared on routers and routed"
    ):
        Specialization(model, method).__enter__()
    with Specialization(model, {"terms": {"variance": {"weight": 0.1}}}) as work:
        assert work.at_work


def test_a_share_beyond_the_largest_weight_is_explained(caplog):
    model = adapted().train()
    with Specialization(model, {"terms": {"dpp": {"share": 1e30}}}) as work:
        assert list(loop(work, model, (1.0, 1.0))) == [None, None]
        work.rest()
    assert "dpp.share: the weight would be more than 1e+12" in caplog.text
    assert "no window gave it a weight; the term had no effect" in caplog.text
    assert "aim is met" not in caplog.text


@pytest.mark.filterwarnings("ignore:.*alpha")
def test_a_share_whose_aim_is_met_later_keeps_its_weight(caplog):
    model = adapted().train()
    method = {"terms": {"erc": {"share": 1.0, "every": 1, "noise": False}, "dpp": {"weight": 0.1}}}
    with Specialization(model, method) as work:
        list(loop(work, model, (1.0,)))
        weight = work.objective.full_weights["erc"]
        work.objective.terms[0].options.alpha = 1e6  # every row of the hinge is 0 from here on
        list(loop(work, model, (1.0, 1.0)))
    assert weight > 0 and work.objective.full_weights["erc"] == weight
    assert caplog.text.count("erc.share: the term has no gradient (its goal is met)") == 2


@pytest.mark.parametrize("every", [None, 1])
def test_grpo_goes_on_over_equal_rewards(tmp_path, every):
    trainer = trainer_for(
        tmp_path, "qwen3_moe", "off", max_steps=4, num_iterations=1, beta=0.0, max_grad_norm=1.0
    )
    trainer.callback.method = resolve_method({"terms": {"dpp": {"share": 0.2, "every": every}}})
    calls = []

    def rewards(completions, **_):
        calls.append(len(completions))
        varied = len(calls) == 2
        return [float(i) if varied else 0.5 for i in range(len(completions))]

    trainer.reward_funcs = [rewards]
    trainer.train()
    weights = {step: logged(trainer, step).get("dpp/weight") for step in (1, 2, 3, 4)}
    assert len(calls) == 4 and weights[1] == 0 and weights[2] > 0
    assert weights[3] == weights[4] == (None if every is None else weights[2])
    assert trainer.callback.specialization.objective.full_weights["dpp"] == weights[2]
