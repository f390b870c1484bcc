"""What a trainer may not do beside injected losses is refused before the first step, by name."""

import os
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import Trainer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from moe_finetune import SpecializationCallback
from moe_finetune.errors import ObjectiveError, RecipeError
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before.prepare import check_launch
from moe_finetune.training.refuse_launch import check_arguments
from moe_finetune.training.specialization import Specialization
from tests.support import tiny
from tests.training.cases import JUDGED, PAIRS, adapted, arguments, collate, rows

RECIPE = {
    "model": {"path": "unused"},
    "lora": {"rank": 4, "alpha": 8},
    "data": {"train": "unused.jsonl"},
}
METHOD = {"terms": {"load_balance": {"weight": 0.3}}}
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]
TRL = {
    "dpo": (DPOConfig, DPOTrainer, PAIRS, {}),
    "kto": (KTOConfig, KTOTrainer, JUDGED, {}),
    "grpo": (GRPOConfig, GRPOTrainer, PROMPTS, {"num_generations": 2}),
    "rloo": (RLOOConfig, RLOOTrainer, PROMPTS, {"num_generations": 2}),
}


def preference(folder, kind, coefficient, model=None):
    config, trainer, data, more = TRL[kind]
    options = {"reward_funcs": lambda completions, **_: [1.0, 0.0]} if more else {}
    return trainer(
        model=model or adapted(),
        args=config(
            output_dir=str(folder),
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_steps=1,
            save_strategy="no",
            per_device_train_batch_size=2,
            router_aux_loss_coef=coefficient,
            **more,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=tiny.tokenizer(),
        callbacks=[SpecializationCallback(METHOD)],
        **options,
    )


@pytest.mark.parametrize("kind", TRL)
@pytest.mark.parametrize("coefficient", [None, 0.02])
def test_the_balance_loss_of_every_trl_trainer_is_refused_without_attach(
    tmp_path, kind, coefficient
):
    with pytest.raises(ObjectiveError, match="router_aux_loss_coef=0"):
        preference(tmp_path, kind, coefficient).train()


def test_a_model_without_a_balance_loss_needs_no_coefficient(tmp_path):
    made = preference(tmp_path, "dpo", None, adapted("deepseek_v2"))
    made.train()
    assert made.state.global_step == 1


def test_router_logits_are_refused_in_a_plain_loop():
    model = adapted().train()
    with Specialization(model, METHOD) as method:
        with pytest.raises(ObjectiveError, match="output_router_logits"):
            model(**tiny.batch(), output_router_logits=True)
        model.eval()
        with torch.no_grad():
            model(**tiny.batch(), output_router_logits=True)  # nobody trains on this
        model.train()
        model.get_base_model().config.output_router_logits = True
        with pytest.raises(ObjectiveError, match="output_router_logits"):
            model(**tiny.batch())
        model(**tiny.batch(), output_router_logits=False).loss.backward()
        method.step()
        assert method.read()["losses/load_balance"] > 0


@pytest.mark.parametrize("how", ["argument", "environment", "attach"])
def test_fp16_is_refused(tmp_path, monkeypatch, how):
    if how != "argument":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    args = arguments(tmp_path, fp16=how == "argument")
    callback = SpecializationCallback(METHOD)
    made = Trainer(
        adapted(), args, data_collator=collate, train_dataset=rows(), callbacks=[callback]
    )
    with pytest.raises(ObjectiveError, match="fp16"):
        callback.attach(made) if how == "attach" else made.train()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_context_parallelism_is_refused(tmp_path, monkeypatch, how):
    args = arguments(tmp_path)
    if how == "argument":
        args.parallelism_config = SimpleNamespace(cp_size=2)
    else:
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ObjectiveError, match=r"parallelism_config: cp_size is 2.*whole rows"):
        check_arguments(args, resolve_method(METHOD), None)


def test_spread_experts_under_fsdp2_are_loaded_by_every_rank(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_launch(recipe_from_tree(Tree(RECIPE | {"parallel": {"experts": 2}})))
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({}, "fsdp_version: 2"),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "set it to true"),
        ({"FSDP_VERSION": "2"}, None),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}, None),
        ({"ACCELERATE_USE_FSDP": "false"}, None),
    ],
)
def test_a_moving_reference_is_refused_where_its_shards_are_others(monkeypatch, setting, remedy):
    for name in ("FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    for name, value in {"ACCELERATE_USE_FSDP": "true", **setting}.items():
        monkeypatch.setenv(name, value)
    keys = {"stage": "dpo", "lora": None, "trainer": {"sync_ref_model": True}}
    recipe = recipe_from_tree(Tree(RECIPE | keys))
    if remedy is None:
        check_launch(recipe)
        return
    with pytest.raises(RecipeError, match=f"sync_ref_model cannot be combined with .*{remedy}"):
        check_launch(recipe)
    check_launch(recipe_from_tree(Tree(RECIPE | keys | {"trainer": {}})))


@pytest.mark.parametrize(
    ("keys", "by_each"),
    [
        ({"stage": "dpo", "lora": None}, True),
        ({"stage": "grpo", "lora": None, "trainer": {"beta": 0.1}, "rewards": ["boxed"]}, True),
        ({"stage": "grpo", "lora": None, "rewards": ["boxed"]}, False),
        ({"stage": "dpo"}, False),
        ({"stage": "sft", "lora": None}, False),
    ],
)
def test_a_reference_is_read_by_each_rank(monkeypatch, keys, by_each):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    check_launch(recipe_from_tree(Tree(RECIPE | keys)))
    expected = "false" if by_each else "true"
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == expected


def test_fp16_autocast_is_refused_in_a_plain_loop():
    model = adapted().train()
    refused = pytest.raises(ObjectiveError, match="fp16")
    with Specialization(model, METHOD), torch.autocast("cpu", torch.float16), refused:
        model(**tiny.batch())
    with Specialization(model, METHOD), torch.autocast("cpu", torch.bfloat16):
        model(**tiny.batch())


@pytest.mark.parametrize("attached", [True, False])
def test_labels_that_label_smoothing_takes_away_are_refused_before_training(tmp_path, attached):
    callback = SpecializationCallback(METHOD, token_mask="labels")
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    made = Trainer(
        adapted(), args, data_collator=collate, train_dataset=rows(), callbacks=[callback]
    )
    forwards = []
    made.model.get_base_model().register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ObjectiveError, match=r"label_smoothing_factor.*token_mask: attention"):
        callback.attach(made) if attached else made.train()
    assert not forwards


def test_a_model_in_eval_mode_is_told_at_its_first_forward(caplog):
    model = adapted().eval()
    with Specialization(model, METHOD) as method:
        for _ in range(2):
            model(**tiny.batch()).loss.backward()
        messages = [r.message for r in caplog.records if "eval mode" in r.message]
        assert len(messages) == 1 and "model.train()" in messages[0]
        with pytest.raises(ObjectiveError, match=r"step 0: .*no effect.*model.train\(\)"):
            method.step()
        model.train()
        with torch.no_grad():
            model(**tiny.batch())
        with pytest.raises(ObjectiveError, match=r"no_grad"):
            method.step()
        model(**tiny.batch()).loss.backward()
        method.step()
        with pytest.raises(ObjectiveError, match="step 1"):
            method.step()
    assert method.read()["losses/load_balance"] > 0


def test_an_evaluation_without_gradients_is_not_warned_about(caplog):
    model = adapted().eval()
    with Specialization(model, METHOD), torch.no_grad():
        model(**tiny.batch())
    assert "eval mode" not in caplog.text


def test_a_family_without_a_place_for_the_bias_is_said_when_training_begins(tmp_path, caplog):
    def train(family, **overrides):
        caplog.clear()
        callback = SpecializationCallback("loss_free", **overrides)
        Trainer(
            adapted(family),
            arguments(tmp_path),
            data_collator=collate,
            train_dataset=rows(),
            callbacks=[callback],
        ).train()
        return "cannot store a routing bias" in caplog.text

    assert train("mixtral")
    assert "Mixtral" in caplog.text and "export_bias: drop" in caplog.text
    assert not train("mixtral", export_bias="drop")
    assert not train("deepseek_v3")


@pytest.mark.parametrize(("scope", "steps", "said"), [("global_batch", 2, True),
                                                      ("global_batch", 1, False),
                                                      ("micro_batch", 2, False)])  # fmt: skip
def test_a_global_batch_that_is_not_the_step_s_is_said(tmp_path, caplog, scope, steps, said):
    method = {"terms": {"load_balance": {"weight": 0.01, "scope": scope}}}
    trainer = Trainer(
        adapted("olmoe"),
        arguments(tmp_path, gradient_accumulation_steps=steps),
        data_collator=collate,
        train_dataset=rows(),
        callbacks=[SpecializationCallback(method)],
    )
    trainer.train()
    assert ("one micro-batch of all processes, not the 2 micro-batches" in caplog.text) == said
