"""The step on fake tensors against the bytes of tensors that are alive in a run's first steps.

They are counted operation by operation, so the figures are the same on every machine. What a
process takes beyond is the benchmark's to say.
"""

import copy

import pytest

from eval.bench.measured import counted_peak
from moe_finetune.recipe.schema import Recipe
from tests.support import tiny
from tests.training.memory.fake_step import fake_plan

EVERYTHING = ["attention", "shared_experts", "experts"]
SETTINGS = {
    # family, preset, LoRA targets, keys of the trainer (and the stage), the worst moment
    "whole": ("deepseek_v2", "dpp", EVERYTHING, {}, "measuring"),
    "checkpointing": (
        "qwen3_moe", "orthogonal_variance", EVERYTHING,
        {"gradient_checkpointing": True, "per_device_train_batch_size": 5},
        "measuring the losses' strength",
    ),
    "attention": ("qwen3_moe", "none", ["attention"], {"optim": "sgd"}, "backward"),
    "window": (
        "deepseek_v3", "erc", EVERYTHING,
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}, "backward",
    ),
    "routers": ("qwen3_moe", "densemixer", EVERYTHING, {}, "backward"),
    "experts": ("deepseek_v3", "specialization_coupling", ["experts"], {}, "measuring"),
    "pairs": ("qwen3_moe", "aux_loss", EVERYTHING, {"stage": "dpo"}, "forward of the ref"),
    "plain": ("mixtral", "none", EVERYTHING, {"per_device_train_batch_size": 6}, "backward"),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_told_is_what_is_alive(setting):
    family, preset, targets, trainer, moment = copy.deepcopy(SETTINGS[setting])
    config = tiny.config(family)
    config.num_hidden_layers = 4
    recipe = Recipe.model_validate(
        {
            "stage": trainer.pop("stage", "sft"),
            "model": {"path": "random", "dtype": "float32", "experts_kernel": "grouped"},
            "method": {"preset": preset},
            "lora": {"rank": 8, "targets": targets},
            "data": {"train": "random", "max_length": 96},
            "trainer": {
                "per_device_train_batch_size": 3,
                "gradient_checkpointing": False,
                **trainer,
            },
        }
    )
    plan = fake_plan(config, recipe, "cpu")
    counted = counted_peak(config, recipe)
    assert 0.95 < plan.total / counted < 1.1
    assert moment in plan.moment
    assert plan.activations > 0.2 * plan.total  # what is compared is not the weights
