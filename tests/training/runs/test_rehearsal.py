"""The step on a toy, in a child, that tells wrong values of `trainer:` early."""

import pytest
import torch

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before import toy_step
from moe_finetune.training.before.toy_step import rehearse, rehearsing, to_rehearse
from moe_finetune.training.run.checkpoint_and_rows import open_start
from tests.support import tiny

USUAL_SFT = {"max_steps": 3, "save_steps": 2, "learning_rate": 1e-4, "warmup_steps": 1}
USUAL = {"max_steps": 3, "beta": 0.2, "save_steps": 2, "learning_rate": 1e-4, "report_to": "none"}


def recipe_of(stage, **trainer):
    """A recipe of ``stage`` that reads no files."""
    rewards = {"rewards": ["exact_match"]} if stage == "grpo" else {}
    tree = {
        "stage": stage,
        "model": {"path": "m"},
        "method": "none",
        "lora": {"rank": 2},
        "data": {"train": "t.jsonl"},
        "trainer": trainer,
        **rewards,
    }
    return recipe_from_tree(Tree(tree))


def test_usual_values_need_no_child():
    assert not to_rehearse(recipe_of("dpo", **USUAL))
    more = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert not to_rehearse(recipe_of("sft", **USUAL_SFT, **more, lr_scheduler_type="cosine"))
    default = recipe_of("grpo", num_generations=2, scale_rewards="group", top_p=1.0)
    assert not to_rehearse(default)
    assert to_rehearse(recipe_of("dpo", **USUAL, loss_type=["ipo"])) == {"loss_type": ["ipo"]}


@pytest.mark.parametrize(
    ("stage", "trainer", "named"),
    [
        ("sft", {"gradient_checkpointing_kwargs": {"foo": 1}}, "trainer.gradient_checkpointing_k"),
        ("sft", {"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, None),
        ("sft", {"pad_token": "foo"}, "trainer.pad_token: 'foo'"),
        ("pretrain", {"lr_scheduler_type": "cosine_with_min_lr"}, "trainer.lr_scheduler_type"),
        ("sft", {"loss_type": "dft", "pad_to_multiple_of": 8, "lr_scheduler_type": "cosine"}, None),
        ("dpo", {"loss_type": ["foo"], "use_weighting": True}, "trainer.loss_type: ['foo']"),
        ("dpo", {"f_divergence_type": "foo"}, "trainer.f_divergence_type: 'foo'"),
        ("dpo", {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.2]}, None),
        ("grpo", {"scale_rewards": "foo", "top_k": 7}, "trainer.scale_rewards: 'foo'"),
        ("grpo", {"cache_implementation": "foo"}, "trainer.cache_implementation: 'foo'"),
        ("grpo", {"generation_kwargs": {"penalti": 1}}, "generation_kwargs.penalti is unknown"),
        ("grpo", {"num_iterations": 2, "loss_type": "dapo", "top_p": 0.9}, None),
        ("grpo", {"use_vllm": True, "vllm_mode": "server", "loss_type": "bnpo"}, None),
    ],
)
def test_a_wrong_value_is_named_by_its_key(stage, trainer, named):
    usual = USUAL if stage in ("dpo", "grpo") else USUAL_SFT
    problem = rehearse(recipe_of(stage, **{**usual, **trainer}), tiny.tokenizer())
    assert (problem is None) == (named is None), problem
    assert named is None or named in problem


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, None),
        ({"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 0}}, None),
        ({"save_strategy": "best", "metric_for_best_model": "mean_token_accuracy"}, None),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, None),
        ({"metric_for_best_model": "nope"}, "trainer.metric_for_best_model: 'nope' is not a res"),
        ({"train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.1}, None),
    ],
)
def test_the_toy_evaluates_and_saves_where_the_run_does(trainer, named):
    """Schedules that follow the evaluation were refused, because the toy had none."""
    recipe = recipe_of("sft", **USUAL_SFT, gradient_accumulation_steps=3, **trainer)
    data = recipe.data.model_copy(update={"validation": "v.jsonl"})
    recipe = recipe.model_copy(update={"data": data})
    assert to_rehearse(recipe)
    problem = rehearse(recipe, tiny.tokenizer())
    assert (problem is None) == (named is None), problem
    assert named is None or named in problem


def test_a_refusal_takes_two_toys_and_is_not_of_what_the_toy_itself_set(monkeypatch):
    toys = []

    def toy(recipe, tokenizer):
        toys.append(recipe.trainer)
        if recipe.trainer.get("loss_type") == ["ipo"]:
            raise ValueError(message)

    monkeypatch.setattr(toy_step, "toy_step", toy)
    recipe = recipe_of("dpo", loss_type=["ipo"], label_smoothing=0.2, use_weighting=True)
    ipo = "trainer.loss_type: ['ipo'] cannot be used here: ipo takes no labels"
    for message, problem in {  # noqa: B007 (the toy raises it)
        "ipo takes no labels": ipo,
        "no": "trainer: loss_type, label_smoothing, use_weighting cannot be used here: no",
        "ipo needs a larger per_device_train_batch_size": "None",
    }.items():
        toys.clear()
        assert str(rehearse(recipe, None)).startswith(problem)
        assert len(toys) <= 2


def test_the_child_has_no_launcher_and_leaves_this_process_alone(tmp_path, monkeypatch):
    """One process of two: its toy must neither wait for the other nor draw from its generators."""
    tiny.save("qwen3_moe", tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    before = torch.get_rng_state()
    for loss, ends in ((["ipo"], True), (["foo"], False)):
        recipe = recipe_of("dpo", loss_type=loss)
        model = recipe.model.model_copy(update={"path": str(tmp_path)})
        with rehearsing(open_start(recipe.model_copy(update={"model": model}))) as rehearsal:
            if ends:
                rehearsal.check()
            else:
                with pytest.raises(RecipeError, match="Unknown loss type: foo"):
                    rehearsal.check()
    assert torch.equal(before, torch.get_rng_state())
