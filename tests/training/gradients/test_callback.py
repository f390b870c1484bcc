"""The callback under TRL's trainer: gradients equal the sum written by hand."""

import json

import pytest
import torch
from transformers import Trainer, TrainerState
from trl import SFTConfig, SFTTrainer

from moe_finetune import SpecializationCallback
from moe_finetune.errors import ObjectiveError, RecipeError
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.layers import model_facts, moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.reached_weights import check_reach
from moe_finetune.training.run_log import RunLog
from tests.support import tiny, tiny_families
from tests.support.objectives import objective_of
from tests.support.tables import with_more
from tests.training.cases import adapted, arguments, collate, rows
from tests.training.gradients.policy import explicit, gradients

TERMS = {
    "load_balance": {"weight": 0.3},
    "orthogonality": {"weight": 0.5},
    "variance": {"weight": 0.7},
    "z_loss": {"weight": 0.02},
}
METHOD = {"terms": TERMS}


class GradientTrainer(SFTTrainer):
    """Keeps the gradients of every optimizer step and the micro-batches behind them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps, self.batches = [], []

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.batches.append({k: v.clone() for k, v in inputs.items() if torch.is_tensor(v)})
        result = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator_step_done = True
        return result

    def _clip_grad_norm(self, *args, **kwargs):
        self.keep()
        return super()._clip_grad_norm(*args, **kwargs)

    def keep(self):
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.steps.append((self.batches, grads))
        self.batches = []


def expected_gradients(model, batches, terms):
    """Token-averaged loss over the window plus each micro-batch's objective over the window."""
    model.zero_grad()
    model.train()
    learned = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    for batch in batches:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        loss = torch.nn.functional.cross_entropy(
            model(**inputs).logits[:, :-1].flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        (loss / learned).backward()
        explicit(model, inputs, terms, 1 / len(batches))
    return gradients(model)


@pytest.mark.parametrize(
    ("accumulation", "checkpointing", "packing", "attached"),
    with_more(
        [(4, False, False, True), (1, False, True, True)],
        [
            (1, False, False, True),
            (4, False, False, False),
            (4, True, False, True),
            (4, True, True, False),
        ],
    ),
)
def test_gradients_under_trl(tmp_path, accumulation, checkpointing, packing, attached):
    model = adapted()
    callback = SpecializationCallback(METHOD)
    trainer = GradientTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1 if packing else 2,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            learning_rate=0.0,
            weight_decay=0.0,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            router_aux_loss_coef=0.0,
            report_to=[],
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            max_length=40,
            packing=packing,
            packing_strategy="wrapped",
        ),
        train_dataset=rows(),
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
    )
    if attached:
        callback.attach(trainer)
    trainer.train()
    windows = [len(batches) for batches, _ in trainer.steps]
    if not packing:
        assert windows == ([1] * 6 if accumulation == 1 else [4, 2])  # a short last window
    assert len(windows) > 1
    fresh = adapted()
    for batches, got in trainer.steps:
        wanted = expected_gradients(fresh, batches, TERMS)
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            error = (got[name] - value).abs().max() / value.abs().max().clamp_min(1e-6)
            assert error < 2e-5, (name, error)


def test_logged_values_equal_a_recount(tmp_path):
    from moe_finetune.losses.functional import load_balancing_loss
    from moe_finetune.metrics import max_violation, routing_entropy, score_variance

    model = adapted()
    trainer = Trainer(
        model,
        arguments(tmp_path, logging_steps=1, learning_rate=0.0),
        data_collator=collate,
        train_dataset=rows(8),
        callbacks=[SpecializationCallback({"terms": {"load_balance": {"weight": 0.1}}})],
    )
    batches = []
    original = trainer.training_step
    trainer.training_step = lambda m, b, *a: (batches.append(b), original(m, b, *a))[1]
    trainer.train()
    logged, records = trainer.state.log_history[0], []
    with (
        torch.no_grad(),
        Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"),
    ):
        model(**{k: v for k, v in batches[0].items() if k != "labels"})
    keep = records[0].mask_T
    assert not keep.all()
    balance = sum(load_balancing_loss(r.probs_TE, r.index_TK, keep) for r in records)
    violation = [
        max_violation(torch.bincount(r.index_TK[keep].flatten(), minlength=12)) for r in records
    ]
    entropy = [routing_entropy(r.probs_TE[keep]) for r in records]
    variance = [score_variance(r.scores_TE[keep]) for r in records]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    assert logged["losses/load_balance"] == pytest.approx(balance.item(), rel=1e-5)
    assert logged["routing/max_violation"] == pytest.approx(mean(violation), rel=1e-6)
    assert logged["routing/entropy"] == pytest.approx(mean(entropy), rel=1e-5)
    assert logged["routing/score_variance"] == pytest.approx(mean(variance), rel=1e-4)


def test_a_term_that_reaches_nothing_trainable_is_refused(tmp_path):
    frozen_experts = add_lora(
        tiny.model("qwen3_moe", num_hidden_layers=1),
        LoraSection(rank=4, alpha=8.0, targets=[]),
        "lora",
    )
    trainer = Trainer(
        frozen_experts,
        arguments(tmp_path),
        data_collator=collate,
        train_dataset=rows(),
        callbacks=[SpecializationCallback({"terms": {"orthogonality": {"weight": 0.1}}})],
    )
    with pytest.raises(ObjectiveError, match=r"orthogonality.*reaches no trainable.*experts"):
        trainer.train()


def test_a_term_that_reads_weights_alone_needs_them_trainable():
    lora = LoraSection(rank=4, alpha=12.0, targets=["attention"])
    model = add_lora(tiny.model("qwen3_moe"), lora, "frozen")
    facts = model_facts(model)
    check_reach(model, objective_of({"variance": {"weight": 0.1}}, facts))
    for name in ("erc", "router_orthogonality"):
        with pytest.raises(ObjectiveError, match=f"{name}: its gradient reaches no trainable"):
            check_reach(model, objective_of({name: {"weight": 1.0}}, facts))


@pytest.mark.parametrize("part", ["shared_expert.up_proj", "shared_expert_gate"])
def test_a_shared_expert_is_not_below_the_routing_of_its_layer(part):
    model = tiny_families.model("qwen2_moe")
    facts, last = model_facts(model), moe_layers(model)[-1].index
    term = {"variance": {"weight": 0.1, "layers": [last]}}
    for layer, reached in ((last, False), (last - 1, True)):
        model.requires_grad_(False)
        model.get_submodule(f"model.layers.{layer}.mlp.{part}").requires_grad_(True)
        if reached:
            check_reach(model, objective_of(term, facts))
        else:
            with pytest.raises(ObjectiveError, match="variance: its gradient reaches no trainable"):
                check_reach(model, objective_of(term, facts))


def test_a_frozen_model_is_refused_though_its_embeddings_have_a_gradient():
    model = tiny.model("qwen3_moe", num_hidden_layers=2)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    objective = objective_of({"variance": {"weight": 0.1}}, model_facts(model))
    with pytest.raises(ObjectiveError, match="variance: its gradient reaches no trainable"):
        check_reach(model, objective)


def test_the_trainers_own_balance_loss_is_refused(tmp_path):
    model = adapted()
    trainer = SFTTrainer(
        model,
        SFTConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, max_steps=1),
        train_dataset=rows(),
        processing_class=tiny.tokenizer(),
    )
    with pytest.raises(ObjectiveError, match="router_aux_loss_coef=0"):
        SpecializationCallback("none").attach(trainer)


def test_a_run_that_begins_again_logs_step_0_once(tmp_path):
    """Resumed before its first checkpoint it starts from step 0, which it has logged before."""
    (tmp_path / "routing").mkdir()
    log, state = RunLog(tmp_path), TrainerState(is_world_process_zero=True)
    for _ in range(2):
        log.on_train_begin(None, state, None)
        with log.run.routing_steps.open("a") as file:
            file.write('{"step": 0}\n')
        log.on_log(None, state, None, logs={"eval_loss": 3.0})
    for path in (log.run.metrics, log.run.routing_steps):
        assert len(path.read_text().splitlines()) == 1


def test_the_log_holds_the_devices_peak_memory(tmp_path, monkeypatch):
    """Of training rows; counted from where training began, not from loading."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * 2**29)
    log, state = RunLog(tmp_path), TrainerState(is_world_process_zero=True)
    log.on_train_begin(None, state, None)
    for logs in ({"loss": 2.0}, {"eval_loss": 3.0}):
        log.on_log(None, state, None, logs=logs)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert calls == ["reset"]
    assert [row.get("peak_memory_gib") for row in rows] == [2.5, None]


def test_a_callback_without_a_method_says_what_to_give():
    with pytest.raises(RecipeError, match='or "none" to log routing metrics'):
        SpecializationCallback()
