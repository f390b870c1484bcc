"""The memory plan: its parts by hand, its moments, and what each setting changes."""

import gc
import json
from functools import partial

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames
from typer.testing import CliRunner

from eval.bench.measured import LiveBytes
from moe_finetune.cli import app
from moe_finetune.errors import RecipeError
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.class_structure import meta_model
from moe_finetune.moe.layers import backbone_of
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.memory.micro_batch import MicroBatch, micro_batch
from moe_finetune.training.memory.plan import (
    GIB,
    STATE_BYTES,
    plan_recipe,
    quantized_bytes,
    shard,
    state_bytes,
    stored_bytes,
)
from moe_finetune.training.memory.step_bytes import EVALUATION
from tests.support import tiny


def recipe(**sections):
    values = {
        "model": {"path": "x", "dtype": "bfloat16"},
        "method": {"preset": "none"},
        "lora": {"rank": 8},
        "data": {"train": "x", "max_length": 96},
        "trainer": {"per_device_train_batch_size": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def test_live_bytes_are_those_of_storages():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first.view(10, 100)[2:]
        assert live.now == 4000
        second = first + 1
        assert (live.now, live.peak) == (8000, 8000)
        del second
        gc.collect()
        assert (live.now, live.peak) == (4000, 8000)
        assert live.reset() == 8000 and live.peak == 4000
        del first
        assert live.now == 4000  # the view still holds it
        del view
        gc.collect()
        assert live.now == 0


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        ("adamw_torch_fused", 8),
        ("paged_adamw_8bit", 2),
        ("lion_32bit", 4),
        ("rmsprop_bnb_8bit", 1),
        ("adagrad", 4),
        ("adafactor", 0),
        ("sgd", 0),
        ("stable_adamw", 8),  # what is unknown counts as Adam's
    ],
)
def test_states_of_optimizers(optimizer, size):
    assert state_bytes(recipe(trainer={"optim": optimizer}), 7064) == size * 7064


def test_states_are_as_large_as_those_of_each_optimizer_that_runs_here(tmp_path):
    measured = set()
    for name in OptimizerNames:
        model = torch.nn.Linear(1024, 1536, bias=False)
        arguments = TrainingArguments(tmp_path, optim=name.value, use_cpu=True, report_to=[])
        try:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
            optimizer = kind(list(model.parameters()), **options)
            model(torch.randn(3, 1024)).square().sum().backward()
            optimizer.step()
        except (ImportError, ValueError, RuntimeError):  # not installed, or needs a GPU
            continue
        values = (value for state in optimizer.state.values() for value in state.values())
        size = sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
        planned = STATE_BYTES[name.value] * model.weight.numel()
        assert size == pytest.approx(planned, rel=0.04, abs=0.01 * model.weight.numel()), name
        measured.add(name.value)
    assert {"ademamix", "ademamix_8bit", "adamw_torch", "lion_8bit", "adafactor"} <= measured
    plan = plan_recipe(tiny.config("qwen3_moe"), recipe(trainer={"optim": "stable_adamw"}))
    assert "stable_adamw is not measured" in "\n".join(plan.lines())


def test_an_evaluation_of_more_rows_than_a_step_is_the_worst_moment():
    config = tiny.config("qwen3_moe")
    one = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    small = plan_recipe(config, recipe(trainer=one))
    plan = plan_recipe(config, recipe(trainer=one, data={"validation": "v"}))
    assert plan.total > small.total and plan.moment == EVALUATION and plan.batch.rows == 8
    assert "per_device_eval_batch_size" in plan.verdict(plan.total / 3 / GIB)
    less = {**one, "per_device_eval_batch_size": 1}
    assert plan_recipe(config, recipe(trainer=less, data={"validation": "v"})).total < plan.total
    off = recipe(trainer={**one, "eval_strategy": "no"}, data={"validation": "v"})
    assert plan_recipe(config, off).total == small.total


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_weights_are_those_of_the_model(family, monkeypatch):
    config = tiny.config(family)
    with torch.device("meta"):
        model = add_lora(meta_model(config), recipe().lora, "full")
    named = dict(model.named_parameters())
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    stored = sum(p.numel() for n, p in named.items() if not p.requires_grad)
    found = stored_bytes(model, recipe())
    assert found.weights_by == {"bfloat16": 2 * stored}
    assert found.adapter == 4 * trained == found.gradients
    packed = stored_bytes(model, recipe(model={"quantization": "nf4"}))
    experts = {n: tuple(p.shape) for n, p in named.items() if p.dim() == 3}
    stacks = sum(quantized_bytes(shape) for shape in experts.values())
    assert stacks < packed.weights_by["nf4"] < 0.3 * found.weights_by["bfloat16"]
    layers = {n.partition(".layers.")[2].partition(".")[0] for n in experts}
    whole = sum(2 * torch.Size(shape).numel() for shape in experts.values())
    largest = max(2 * torch.Size(shape).numel() for shape in experts.values())
    assert packed.opened == largest  # all experts of a stack fit into one chunk
    monkeypatch.setattr("moe_finetune.training.memory.plan.DEQUANTIZED_BYTES", largest // 2)
    assert stored_bytes(model, recipe(model={"quantization": "nf4"})).opened == largest // 2
    away = stored_bytes(model, recipe(model={"offload": "experts"}))
    assert away.host == whole and away.staged == 2 * whole // len(layers)
    assert away.weights == found.weights - away.host + away.staged
    spread = stored_bytes(model, recipe(parallel={"experts": 4}))
    assert found.weights - spread.weights == whole - whole // 4
    assert (spread.adapter, spread.gradients) == (found.adapter, found.gradients)
    both = stored_bytes(model, recipe(parallel={"experts": "all"}), gpus=4)
    sharded = stored_bytes(model, recipe(), gpus=4)
    assert both.adapter == sharded.adapter and both.opened < sharded.opened - largest


def test_quantized_sizes_are_those_of_the_packed_tensors():
    from moe_finetune.quantization.weight import QuantizedWeight

    for shape in ((3, 10, 26), (10, 26)):
        packed = QuantizedWeight.empty(shape, torch.float32)
        assert packed.stored_bytes == quantized_bytes(shape)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_what_each_setting_changes(family):
    config, whole_layers = tiny.config(family), {"gradient_checkpointing": False}
    plan = partial(plan_recipe, config, device="cpu")
    whole = plan(recipe(trainer=whole_layers))
    again = plan(recipe(trainer={"gradient_checkpointing": True}))
    assert again.step < 0.7 * whole.step and again.total < whole.total
    twice = plan(recipe(trainer={**whole_layers, "per_device_train_batch_size": 4}))
    # Factors in bfloat16 are kept as well, whatever the batch is.
    assert 1.6 < twice.step / whole.step < 2.01
    losses = plan(
        recipe(method={"preset": "orthogonal_variance", "strength": {"first": False}},
               trainer=whole_layers),
    )  # fmt: skip
    assert losses.step > whole.step
    measured = plan(recipe(method={"preset": "aux_loss"}, trainer=whole_layers))
    often = {"terms": {"load_balance": {"share": 0.1, "every": 3}}}
    later = plan(recipe(method=often, trainer=whole_layers))
    assert "strength" in later.moment and later.optimizer == later.stored.states
    assert later.total > measured.total
    window = plan(recipe(trainer={**whole_layers, "gradient_accumulation_steps": 3}))
    assert whole.step < window.step <= whole.step + whole.stored.gradients
    moved = plan(recipe(trainer={**whole_layers, "activation_offloading": True}))
    assert moved.step < 0.8 * whole.step
    deeper = tiny.config(family)
    deeper.num_hidden_layers = 9
    assert (
        plan_recipe(deeper, recipe(trainer=whole_layers), "cpu").activations > 2 * whole.activations
    )
    assert whole.activations + whole.stored.fixed == whole.total
    assert set(whole.to_mapping()) >= {"total", "activations", "weights_by", "moment"}


def staged(stage, lora=True, sections=None, **trainer):
    values = recipe().to_mapping() | {"stage": stage}
    values |= sections or {}
    values["trainer"] = {"per_device_train_batch_size": 3, **trainer}
    if not lora:
        values |= {"lora": None, "router": {"train": "full"}}
    return Recipe.model_validate(values)


REWARDS = {"rewards": [{"name": "exact_match"}]}


def test_the_step_of_each_stage():
    assert micro_batch(staged("sft")) == MicroBatch(3, 96)
    assert micro_batch(staged("sft", pad_to_multiple_of=36)) == MicroBatch(3, 108)
    assert micro_batch(staged("dpo")) == MicroBatch(6, 96)
    assert micro_batch(staged("dpo", lora=False)).reference
    assert micro_batch(staged("dpo", precompute_ref_log_probs=True)) == MicroBatch(6, 96)
    more = {"gradient_accumulation_steps": 4, "max_completion_length": 32}
    assert micro_batch(staged("grpo", sections=REWARDS, **more)) == MicroBatch(3, 128)
    full = staged("grpo", lora=False, sections=REWARDS, beta=0.1, **more)
    assert micro_batch(full).reference


def test_a_token_mask_of_labels_has_the_same_plan():
    config, method = tiny.config("qwen3_moe"), {"preset": "orthogonal_variance"}
    by_labels = recipe(method={**method, "token_mask": "labels"})
    assert plan_recipe(config, by_labels).total == plan_recipe(config, recipe(method=method)).total


def test_what_stages_add_to_the_plan():
    config = tiny.config("qwen3_moe")
    plans = {stage: plan_recipe(config, staged(stage), "cpu") for stage in ("sft", "dpo")}
    assert plans["dpo"].batch.tokens == 2 * plans["sft"].batch.tokens
    assert 1.6 < plans["dpo"].step / plans["sft"].step < 2.6
    stored = plan_recipe(config, staged("dpo", lora=False)).stored
    assert stored.reference == stored.weights == 2 * plans["sft"].stored.weights


def test_the_command_says_whether_it_fits(tiny_checkpoint, tmp_path):
    folder = str(tiny_checkpoint("qwen3_moe"))
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"model: {{path: {folder}}}\nlora: {{rank: 8}}\n"
        "data: {train: x.jsonl, max_length: 512}\nmethod: {preset: erc}\n"
        "trainer: {per_device_train_batch_size: 2, gradient_checkpointing: false}\n"
    )
    call = ["inspect", folder, "--recipe", str(file)]
    fits = CliRunner().invoke(app, [*call, "--gpu", "24"])
    assert fits.exit_code == 0 and "fits: needs" in fits.output
    small = CliRunner().invoke(app, [*call, "--gpu", "0.01"])
    assert small.exit_code == 1 and "does not fit: needs" in small.output
    assert "docs/memory.md" in small.output
    facts = json.loads(CliRunner().invoke(app, [*call, "--gpu", "0.01", "--json"]).stdout)
    assert facts["fits"] is False and facts["memory"]["total"] > 0.01 * GIB
    one, eight = (
        json.loads(CliRunner().invoke(app, [*call, "--json", *gpus]).stdout)["memory"]
        for gpus in ([], ["--gpus", "8"])
    )
    assert 4 * eight["all_states"] < one["all_states"]
    for wrong in (
        ["inspect", folder, "--gpu", "24"],
        ["inspect", folder, "--gpus", "8"],
        [*call, "--gpu", "-3"],
    ):
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code != 0 and isinstance(refused.exception, RecipeError | SystemExit)


@pytest.fixture
def eight_ranks():
    """A group of eight of which this process is the first; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (8,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_gpu_of_eight_holds_what_fsdp2_leaves_it(family, eight_ranks):
    """Of rank 0, whose part is the largest; tensors here do not divide by 8."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = add_lora(meta_model(tiny.config(family)), recipe().lora, "full")
    planned = stored_bytes(model, recipe(), gpus=8)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    whole = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    for layer in backbone_of(model).layers:
        fully_shard(layer, mesh=eight_ranks)
    fully_shard(model, mesh=eight_ranks)
    sharded = dict(model.named_parameters())
    local = {name: parameter.to_local() for name, parameter in sharded.items()}
    told = {name: shard(shape, 8) for name, shape in shapes.items()}
    assert told == {name: tuple(part.shape) for name, part in local.items()}
    trained = {n: part for n, part in local.items() if sharded[n].requires_grad}
    assert planned.gradients == sum(4 * part.numel() for part in trained.values())
    stored = sum(2 * part.numel() for name, part in local.items() if name not in trained)
    assert planned.weights_by == {"bfloat16": stored}
    assert planned.adapter == sum(4 * part.numel() for part in trained.values())
    layers = [
        sum(whole[n] * (4 if n in trained else 2) for n in whole if f".layers.{index}." in n)
        for index in range(len(backbone_of(model).layers))
    ]
    gradients = max(
        sum(4 * whole[n] for n in trained if f".layers.{index}." in n)
        for index in range(len(layers))
    )
    assert planned.opened == 2 * max(layers) + 2 * gradients
    outside = [n for n in whole if ".layers." not in n]
    assert planned.staged == sum(2 * whole[n] for n in outside)


def test_several_gpus_share_what_one_holds():
    config = tiny.config("qwen3_moe")
    one, eight = (plan_recipe(config, recipe(), gpus=gpus) for gpus in (1, 8))
    assert eight.optimizer < one.optimizer / 4
    assert eight.stored.adapter < one.stored.adapter / 4
    assert eight.stored.gradients == pytest.approx(one.stored.gradients / 8, rel=0.05)
    assert eight.batch == one.batch
    packed = recipe(model={"quantization": "nf4"})
    assert plan_recipe(config, packed, gpus=8).stored.weights < eight.stored.weights
    with pytest.raises(RecipeError, match=r"cannot be combined with FSDP2"):
        plan_recipe(config, recipe(model={"offload": "experts"}), gpus=8)
