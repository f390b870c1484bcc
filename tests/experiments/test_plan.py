"""The plan: parameters, memory, tokens and FLOPs by hand, from configs alone."""

import json
from pathlib import Path

import pytest

from moe_finetune.experiments import expand, load_study
from moe_finetune.experiments.plan import (
    Estimator,
    flops_per_token,
    model_size,
    plan_text,
    training_tokens,
)
from moe_finetune.experiments.recipe import PlanSection
from moe_finetune.models.fresh import fresh_config, fresh_model
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.tree import Tree, merge_mappings
from moe_finetune.training.memory.plan import GIB
from tests import tiny
from tests.published import fixture


@pytest.fixture
def qwen(tmp_path) -> Path:
    """The published config of Qwen3-30B-A3B, without weights or tokenizer."""
    config = fixture.read("qwen3_30b_a3b").config
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def recipe(path: Path, **sections) -> Recipe:
    values = {"model": {"path": str(path)}, "data": {"train": "hub/data"}, "method": "aux_loss"}
    return recipe_from_tree(Tree(merge_mappings(values, sections)))


def test_size_of_a_published_model(qwen):
    size = model_size(recipe(qwen, lora={"rank": 32, "targets": ["attention"]}))
    assert size.parameters == 30_532_122_624
    experts, one = 48 * 128 * 3 * 768 * 2048, 48 * 8 * 3 * 768 * 2048
    assert size.active == 30_532_122_624 - experts + one - 151_936 * 2048
    heads = {"q": (2048, 4096), "k": (2048, 512), "v": (2048, 512), "o": (4096, 2048)}
    adapter = 48 * 32 * sum(a + b for a, b in heads.values())
    routers = 48 * 128 * 2048
    assert size.trained == adapter + routers == size.trained_active
    assert size.attention == 48 * 32 * (128 + 128)
    assert size.memory.weights == 2 * 30_532_122_624


def test_lora_on_experts_trains_only_those_that_a_token_uses(qwen):
    size = model_size(
        recipe(qwen, lora={"rank": 8, "targets": ["experts"]}, router={"train": "frozen"})
    )
    a_layer = 8 * ((2048 + 2 * 768) + (768 + 2048))
    assert size.trained == 48 * 128 * a_layer
    assert size.trained_active == 48 * 8 * a_layer


def test_flops_of_full_training_are_six_per_weight_and_attention(tiny_checkpoint):
    path = tiny_checkpoint("mixtral")
    full = recipe(
        path, lora=None, trainer={"gradient_checkpointing": False}, data={"max_length": 64}
    )
    size = model_size(full)
    model = tiny.model("mixtral")
    routed = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
    embedding = model.get_input_embeddings().weight.numel()
    active = sum(p.numel() for p in model.parameters()) - routed * 9 // 12 - embedding
    assert size.active == size.trained_active == active
    scores = 3 * 4 * (32 + 32) * 64  # layers, heads, dimensions of keys and values, context
    assert flops_per_token(size, full) == 6 * active + 3 * scores
    again = full.model_copy(update={"trainer": {}})
    assert flops_per_token(size, again) == 8 * active + 4 * scores


def test_lora_saves_the_gradients_of_frozen_weights(tiny_checkpoint):
    lora = recipe(
        tiny_checkpoint("mixtral"),
        lora={"rank": 4, "targets": ["attention"]},
        trainer={"gradient_checkpointing": False},
        data={"max_length": 64},
    )
    size = model_size(lora)
    scores = size.attention * 64
    assert flops_per_token(size, lora) == 4 * size.active + 2 * size.trained_active + 3 * scores


def test_a_random_model_is_counted_as_it_is_built(tiny_checkpoint):
    path, changes = tiny_checkpoint("olmoe"), {"num_experts": 5, "num_hidden_layers": 2}
    scratch = recipe(
        path, lora=None, model={"path": str(path), "init": "random", "config": changes}
    )
    built = fresh_model(fresh_config(path, changes)[0], 0)
    parameters = sum(p.numel() for p in built.parameters())
    size = model_size(scratch)
    assert size.parameters == size.trained == parameters
    assert size.memory.weights == 4 * parameters, "float32, whatever it computes in"
    assert size.memory.optimizer == 8 * parameters and size.memory.adapter == 0
    assert size.memory.all_gradients == 4 * parameters


def test_tokens_by_steps_by_assumption_by_files_or_unknown(qwen, tmp_path):
    steps = recipe(
        qwen,
        trainer={
            "max_steps": 10,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 4,
        },
        data={"max_length": 100},
    )
    assert training_tokens(steps, PlanSection(devices=2))[0] == 10 * 3 * 4 * 2 * 100
    plain = recipe(qwen)
    assert training_tokens(plain, PlanSection(tokens=5e6))[0] == 5e6
    tokens, why = training_tokens(plain, PlanSection())
    assert tokens is None and "set plan.tokens" in why
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, size in zip(files, (800, 1200), strict=True):
        file.write_text("x" * size)
    local = recipe(
        qwen, data={"train": [str(files[0]), {"path": str(files[1])}]},
        trainer={"num_train_epochs": 2},
    )  # fmt: skip
    assert training_tokens(local, PlanSection())[0] == 2000 / 4 * 2


def test_memory_and_hours_are_shared_out(qwen):
    run = recipe(qwen, lora={"rank": 8, "targets": ["attention"]}, data={"max_length": 512})
    one, four = (
        Estimator(PlanSection(tokens=1e6, devices=n, memory_gib=40.0))(run) for n in (1, 4)
    )
    assert one.hours == pytest.approx(4 * four.hours)
    assert one.flops == pytest.approx(1e6 * flops_per_token(one.size, run))
    assert one.hours == pytest.approx(one.flops / (989e12 * 0.15) / 3600)
    held = one.size.memory.total - one.size.memory.activations
    assert one.memory - four.memory == pytest.approx(held * 3 / 4)
    assert one.least_devices == 2 and held / GIB > 40


def test_plan_lists_arms_totals_and_what_is_unknown(qwen, write_study, tmp_path):
    arms = {
        "known": {"model": {"path": str(qwen)}},
        "far": {"model": {"path": str(tmp_path / "x")}},
    }
    study = load_study(
        write_study({
            "base": {"data": {"train": "hub/data"}}, "axes": {"model": arms}, "seeds": [1, 2],
            "plan": {"tokens": 1.0e6},
        })
    )  # fmt: skip
    text = plan_text(study, expand(study))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["known"][1:4] == ["2", "30.5", "B"] and lines["far"][1:3] == ["2", "?"]
    assert "for the 2 runs whose time can be estimated" in text
    assert f"?: {tmp_path / 'x'}: no such folder" in text
    assert "H100" in text and "15% utilization" in text
    assert not (tmp_path / "out").exists()
