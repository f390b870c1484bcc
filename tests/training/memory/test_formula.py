"""The formula of a step's bytes against TRL's own step on fake tensors, at published widths."""

import json

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune.data.row_lengths import LengthsOfData, RowLengths
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree, merge_mappings
from moe_finetune.training.memory.plan import BOUND, stored_bytes
from moe_finetune.training.memory.step_bytes import EVALUATION, step_bytes
from tests.published.fixture import FOLDER
from tests.support.tables import table
from tests.training.memory.fake_step import adapted_model, step_peaks

FAMILIES = ("olmoe_1b_7b", "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3", "granite_3_1_1b",
            "glm_4_5_air")  # fmt: skip
BASE = {
    "model": {"path": "x"},
    "method": {"preset": "none"},
    "lora": {"rank": 16},
    "data": {"train": "x", "max_length": 2048},
    "trainer": {"per_device_train_batch_size": 2},
}
SETTINGS = {
    "usual": {},
    "long": {"data": {"max_length": 8192}, "trainer": {"per_device_train_batch_size": 1}},
    "whole": {"trainer": {"gradient_checkpointing": False}},
    "losses": {"method": {"preset": "orthogonal_variance"}, "router": {"train": "full"}},
    "pairs": {"stage": "dpo"},
    "window": {"trainer": {"gradient_accumulation_steps": 4}},
    "float32": {"model": {"dtype": "float32"}},
    "offloaded": {"trainer": {"activation_offloading": True}},
    "rank 64, whole": {"lora": {"rank": 64}, "trainer": {"gradient_checkpointing": False}},
    "rank 256": {"lora": {"rank": 256}},
    "rank 256, whole": {"lora": {"rank": 256}, "trainer": {"gradient_checkpointing": False}},
    "attention alone": {"lora": {"rank": 64, "targets": ["attention"]}},
    "attention alone, whole": {
        "lora": {"rank": 64, "targets": ["attention"]},
        "trainer": {"gradient_checkpointing": False},
    },
    "rows of 32k": {
        "data": {"max_length": 32768},
        "trainer": {"per_device_train_batch_size": 1},
    },
    "padded rows of 16k": {"data": {"max_length": 16384}},
    "evaluated": {"data": {"validation": "v"}, "trainer": {"per_device_train_batch_size": 1}},
    "evaluated, eager": {
        "model": {"attn_implementation": "eager"},
        "data": {"validation": "v", "max_length": 1024},
        "trainer": {"per_device_train_batch_size": 1},
    },
}
SHORT = LengthsOfData(RowLengths(90, 312, 9000), RowLengths(7, 531, 2000))
OF_ROWS = {
    "sft": {"trainer": {"per_device_train_batch_size": 8}},
    "dpo": {"stage": "dpo", "trainer": {"per_device_train_batch_size": 6}},
    "grpo": {
        "stage": "grpo", "rewards": ["exact_match"],
        "trainer": {"per_device_train_batch_size": 8, "max_completion_length": 200, "beta": 0.1},
    },
    "dpo, evaluated": {
        "stage": "dpo", "data": {"validation": "v"}, "trainer": {"per_device_train_batch_size": 1},
    },
}  # fmt: skip
HYBRIDS = {"granite_4_0_h_tiny": 1024, "nemotron_3_nano": 1024, "lfm2_8b_a1b": 1024,
           "qwen3_next": 1024, "kimi_linear": 256, "jamba_v0_1": 128}  # fmt: skip
"""Their rows' length: without kernels, the longer take minutes."""
LAYERS = dict.fromkeys(("olmoe_1b_7b", "qwen3_30b_a3b", "mixtral_8x7b", "granite_3_1_1b"), 3)
"""First layers that a case has where all are of one kind; else five, so that each kind is there."""


def config_of(name):
    """A published config with its first layers."""
    published = json.loads((FOLDER / f"{name}.json").read_text())
    published = published.get("config", published)
    config = CONFIG_MAPPING[published["model_type"]].from_dict(published)
    layers, first = config.num_hidden_layers, LAYERS.get(name, 5)
    config.num_hidden_layers = first
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, key, value[:first])
    return config


CASES = table(FAMILIES, SETTINGS, every=4, whole_columns=("usual", "losses"))


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_formula_is_within_its_bound_of_the_step(name, setting):
    check(name, SETTINGS[setting])


@pytest.mark.parametrize(("name", "setting"), table(HYBRIDS, ("usual", "whole"), every=2))
def test_mamba_and_linear_attention_are_within_the_bound(name, setting):
    check(name, {**SETTINGS[setting], "data": {"max_length": HYBRIDS[name]}})


@pytest.mark.parametrize(("name", "setting"), table(FAMILIES[:4], OF_ROWS, every=2))
def test_rows_that_are_read_are_within_the_bound(name, setting):
    check(name, OF_ROWS[setting], SHORT)


def check(name, setting, lengths=None):
    recipe = recipe_from_tree(Tree(merge_mappings(BASE, setting)))
    model = adapted_model(config_of(name), recipe, "cuda")
    formula = step_bytes(model, recipe, "cuda", stored_bytes(model, recipe).gradients, lengths)
    step = step_peaks(model, recipe, "cuda", lengths=lengths)
    if recipe.data.validation is not None:
        assert max(step, key=step.get) == max(formula, key=formula.get) == EVALUATION
    assert max(formula.values()) / max(step.values()) == pytest.approx(1, abs=BOUND)
