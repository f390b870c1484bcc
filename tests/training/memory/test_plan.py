"""The memory plan: its parts by hand, its moments, its remedies, and the truth."""

import gc
import json

import pytest
import torch
from typer.testing import CliRunner

from moe_finetune.cli import app
from moe_finetune.errors import RecipeError, UnsupportedModelError
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.structure import meta_model
from moe_finetune.moe.layers import backbone_of
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.memory.borders import LayerBytes, LiveBytes
from moe_finetune.training.memory.optimizers import optimizer_of, state_bytes
from moe_finetune.training.memory.plan import put_together
from moe_finetune.training.memory.profile import StepProfile
from moe_finetune.training.memory.remedies import remedies
from moe_finetune.training.memory.stage import StepShape, cache_bytes, step_shape
from moe_finetune.training.memory.verdict import GIB, judge, plan_recipe
from moe_finetune.training.memory.weights import quantized_bytes, weights_of
from tests import tiny, tiny_families


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


def test_states_of_optimizers():
    shapes = [(100, 70), (64,)]
    assert state_bytes(optimizer_of("adamw_torch_fused"), shapes) == 2 * 4 * (7000 + 64)
    # 28 blocks of 256 with a float32 scale each; what is small stays in 32 bits.
    assert state_bytes(optimizer_of("adamw_8bit"), shapes) == 2 * (7000 + 28 * 4) + 2 * 4 * 64
    assert state_bytes(optimizer_of("adafactor"), shapes) == 4 * (100 + 70 + 64)
    assert state_bytes(optimizer_of("sgd"), shapes) == 0
    with pytest.raises(
        RecipeError, match=r"trainer\.optim: the states of 'adamw_9bit' are unknown"
    ):
        optimizer_of("adamw_9bit")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_weights_are_those_of_the_model(family, monkeypatch):
    config = tiny.config(family)
    with torch.device("meta"):
        model = add_lora(meta_model(config), recipe().lora, "full")
    named = dict(model.named_parameters())
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    stored = sum(p.numel() for n, p in named.items() if not p.requires_grad)
    found = weights_of(model, recipe())
    assert found.by_type == {"bfloat16": 2 * stored}
    assert found.added == 4 * trained == sum(found.layer_gradients) + found.other_gradients
    assert found.layer_gradients[0] < found.layer_gradients[1] or family == "qwen3_moe"
    packed = weights_of(model, recipe(model={"quantization": "nf4"}))
    experts = {n: tuple(p.shape) for n, p in named.items() if p.dim() == 3}
    stacks = sum(quantized_bytes(shape, "nf4") for shape in experts.values())
    assert stacks < packed.by_type["nf4"] < 0.3 * found.by_type["bfloat16"]
    layers = {n.partition(".layers.")[2].partition(".")[0] for n in experts}
    whole = sum(2 * torch.Size(shape).numel() for shape in experts.values())
    largest = max(2 * torch.Size(shape).numel() for shape in experts.values())
    assert packed.opened == largest  # all experts of a stack fit into one chunk
    monkeypatch.setattr("moe_finetune.training.memory.weights.DEQUANTIZED_BYTES", largest // 2)
    assert weights_of(model, recipe(model={"quantization": "nf4"})).opened == largest // 2
    away = weights_of(model, recipe(model={"offload": "experts"}))
    assert away.host == whole and away.staged == 2 * whole // len(layers)
    assert away.device == found.device - away.host + away.staged


def test_quantized_sizes_are_those_of_the_packed_tensors():
    from moe_finetune.quantization.weight import QuantizedWeight

    for kind in ("nf4", "int8"):
        for shape in ((3, 10, 26), (10, 26)):
            packed = QuantizedWeight.empty(shape, kind, torch.float32)
            assert packed.stored_bytes == quantized_bytes(shape, kind)


class OneWeight:
    """Weights whose plan can be done by hand."""

    device, added, opened, host = 1000, 50, 0, 0
    by_type = {"bfloat16": 1000}  # noqa: RUF012
    trained = [(5,)]  # noqa: RUF012
    layer_gradients = [8, 12]  # noqa: RUF012
    other_gradients = 0
    measured_gradients, parameters = 16, 1000


def test_the_worst_moment():
    layers = [
        LayerBytes(kept=100, forward=130, backward=90, released=100),
        LayerBytes(kept=200, forward=210, backward=150, released=200),
    ]
    fixed = 1000 + 50 + 2 * 4 * 5
    head = put_together(OneWeight, StepProfile(layers, 10, 170, 20), recipe())
    assert (head.moment, head.total) == ("head and loss", fixed + 10 + 300 + 170)
    backward = put_together(OneWeight, StepProfile(layers, 10, 40, 20), recipe())
    assert backward.moment == "backward of layer 1"
    assert backward.total == fixed + 10 + 300 + 20 + 150
    window = recipe(trainer={"gradient_accumulation_steps": 3})
    assert put_together(OneWeight, StepProfile(layers, 10, 40, 20), window).total == (
        backward.total + 20
    )
    # Measured once, there are no states yet: 40 bytes less beside 16 of each of two losses more.
    once = recipe(method={"preset": "aux_loss"})
    assert put_together(OneWeight, StepProfile(layers, 10, 40, 20), once).total == backward.total
    often = recipe(method={"terms": {"load_balance": {"share": 0.1, "every": 3}}})
    first = put_together(OneWeight, StepProfile(layers, 10, 40, 20), often)
    assert first.moment == "measuring the losses' strength, backward of one of them"
    assert first.total == backward.total + 2 * 16  # of the loss, and of the language loss
    three = recipe(method={"preset": "orthogonal_variance"})  # 4 x 4 parameters are few beside 1000
    third = put_together(OneWeight, StepProfile(layers, 10, 40, 20), three)
    assert third.total == backward.total + 4 * 16 - 2 * 4 * 5
    assert (third.optimizer, third.all_states, third.fixed) == (0, 40, fixed + 20)
    heavy = type("Heavy", (OneWeight,), {"measured_gradients": 4 * 600})  # 2 x 600 are more
    on_gpu, on_cpu = (
        put_together(heavy, StepProfile(layers, 10, 40, 20), often, device)
        for device in ("cuda", "cpu")
    )
    assert on_gpu.total == backward.total  # in the host's memory, which a CPU's run has only
    assert on_cpu.total == backward.total + 2 * 4 * 600
    unmeasured = recipe(method={"preset": "aux_loss", "strength": {"first": False}})
    later = put_together(OneWeight, StepProfile(layers, 10, 40, 20), unmeasured)
    assert later.total == backward.total
    assert backward.activations + backward.fixed == backward.total
    assert set(backward.to_mapping()) >= {"total", "activations", "weights_by", "moment"}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_what_each_setting_changes(family):
    config = tiny.config(family)
    whole = plan_recipe(config, recipe(trainer={"gradient_checkpointing": False}))
    again = plan_recipe(config, recipe(trainer={"gradient_checkpointing": True}))
    assert again.kept < 0.3 * whole.kept and again.total < whole.total
    twice = plan_recipe(
        config,
        recipe(trainer={"gradient_checkpointing": False, "per_device_train_batch_size": 4}),
    )
    # Factors in bfloat16 are kept as well, whatever the batch is.
    assert 1.8 * whole.kept < twice.kept < 2.01 * whole.kept
    losses = plan_recipe(
        config,
        recipe(method={"preset": "orthogonal_variance"}, trainer={"gradient_checkpointing": False}),
        with_losses=True,
    )
    assert losses.losses > 0 and losses.total == whole.total + losses.losses
    deeper = tiny.config(family)
    deeper.num_hidden_layers = 9
    more = plan_recipe(deeper, recipe(trainer={"gradient_checkpointing": False}))
    assert more.kept > 2.5 * whole.kept  # layers that were never run


def staged(stage, lora=True, sections=None, **trainer):
    values = recipe().to_mapping() | {"stage": stage}
    values |= sections or {}
    values["trainer"] = {"per_device_train_batch_size": 3, **trainer}
    if not lora:
        values |= {"lora": None, "router": {"train": "full"}}
    return Recipe.model_validate(values)


REWARDS = {"rewards": [{"name": "exact_match"}]}


def test_the_step_of_each_stage():
    assert step_shape(staged("sft")) == StepShape(3, 96, 96)
    assert step_shape(staged("dpo")) == StepShape(6, 96, 96, concurrent=True)
    assert step_shape(staged("dpo", lora=False)).second == "reference"
    assert step_shape(staged("dpo", precompute_ref_log_probs=True)) == StepShape(6, 96, 96)
    more = {"gradient_accumulation_steps": 4, "max_completion_length": 32}
    grpo = step_shape(staged("grpo", sections=REWARDS, **more))
    assert grpo == StepShape(3, 128, 96, generated=12)
    vllm = step_shape(staged("grpo", sections=REWARDS, use_vllm=True, **more))
    assert vllm == StepShape(3, 128, 96)
    full = staged("grpo", lora=False, sections=REWARDS, beta=0.1, **more)
    assert step_shape(full).second == "reference"


def test_a_token_mask_of_labels_has_the_same_plan():
    config, method = tiny.config("qwen3_moe"), {"preset": "orthogonal_variance"}
    by_labels = recipe(method={**method, "token_mask": "labels"})
    assert plan_recipe(config, by_labels).total == plan_recipe(config, recipe(method=method)).total


def test_what_stages_add_to_the_plan():
    config = tiny.config("qwen3_moe")
    plans = {stage: plan_recipe(config, staged(stage)) for stage in ("sft", "dpo")}
    assert plans["dpo"].tokens == 2 * plans["sft"].tokens
    assert 1.8 < plans["dpo"].kept / plans["sft"].kept < 2.01
    second = plan_recipe(config, staged("dpo", lora=False)).second
    assert second == plans["sft"].weights
    more = {"max_completion_length": 700, "gradient_accumulation_steps": 1333}
    grpo = plan_recipe(config, staged("grpo", sections=REWARDS, **more))
    assert grpo.moment == "generating 3999 rows of 796 tokens"
    a_token = 2 * config.num_key_value_heads * config.head_dim * 2  # keys, values; bfloat16
    assert grpo.kept == 3999 * 796 * a_token * (config.num_hidden_layers + 1)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_cache_is_as_large_as_the_models_own(family):
    model = tiny.model(family)
    with torch.no_grad():
        cache = model(torch.zeros(2, 23, dtype=torch.int64), use_cache=True).past_key_values
    real = [2 * 23 * (k.shape[1] * (k.shape[3] + v.shape[3])) * 4 for k, v in keys(cache)]
    assert [2 * (fixed + 23 * token) for fixed, token in cache_bytes(model)] == real


def keys(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_changes_come_in_order_until_it_fits():
    """With a need that is easy to follow."""

    def need(tried):
        trainer = tried.trainer
        total = 1000 if trainer.get("gradient_checkpointing") else 2000
        total += 100 * trainer["per_device_train_batch_size"] + tried.data.max_length
        return total - (200 if tried.model.quantization == "nf4" else 0)

    start = recipe(
        data={"max_length": 600},
        trainer={"gradient_checkpointing": False, "per_device_train_batch_size": 4},
    )
    found = remedies(start, "cuda", 1250, need)
    assert [(row.change, row.total) for row in found] == [
        ("trainer.gradient_checkpointing: true", 2000),
        ("trainer.per_device_train_batch_size: 2, gradient_accumulation_steps: 2", 1800),
        ("trainer.per_device_train_batch_size: 1, gradient_accumulation_steps: 4", 1700),
        ("model.quantization: nf4", 1500),
        ("data.max_length: 300", 1200),
    ]
    assert [row.fits for row in found] == [False] * 4 + [True]
    assert not remedies(start, "cuda", 10, need)[-1].fits


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
    small = CliRunner().invoke(app, [*call, "--gpu", "0.05", "--json"])
    verdict = json.loads(small.stdout)["verdict"]
    assert small.exit_code == 1 and not verdict["fits"]
    assert verdict["changes"][0]["change"] == "trainer.gradient_checkpointing: true"
    assert verdict["memory"]["total"] > verdict["room"]
    one, eight = (
        json.loads(CliRunner().invoke(app, [*call, "--json", *gpus]).stdout)["memory"]
        for gpus in ([], ["--gpus", "8"])
    )
    assert 4 * eight["optimizer"] < one["optimizer"]
    for wrong in (
        ["inspect", folder, "--gpu", "24"],
        ["inspect", folder, "--gpus", "8"],
        [*call, "--gpu", "-3"],
    ):
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code != 0 and isinstance(refused.exception, RecipeError | SystemExit)


def test_a_plan_reads_no_weight(tiny_checkpoint):
    verdict = judge(tiny.config("qwen3_moe"), recipe(), 24.0)
    assert verdict.fits and verdict.gpu == 24 * GIB and not verdict.changes
    assert "fits" in verdict.text()


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
    planned = weights_of(model, recipe()).sharded(8)
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for layer in backbone_of(model).layers:
        fully_shard(layer, mesh=eight_ranks)
    fully_shard(model, mesh=eight_ranks)
    sharded = dict(model.named_parameters())
    local = {name: parameter.to_local() for name, parameter in sharded.items()}
    trained = {n: part for n, part in local.items() if sharded[n].requires_grad}
    assert sorted(planned.trained) == sorted(tuple(part.shape) for part in trained.values())
    stored = sum(2 * part.numel() for name, part in local.items() if name not in trained)
    assert planned.by_type == {"bfloat16": stored}
    assert planned.added == sum(4 * part.numel() for part in trained.values())
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
    assert eight.optimizer < one.optimizer / 4 and eight.adapter < one.adapter / 4
    assert eight.all_gradients == pytest.approx(one.all_gradients / 8, rel=0.05)
    assert eight.tokens == one.tokens and eight.head == one.head
    packed = recipe(model={"quantization": "nf4"})
    assert plan_recipe(config, packed, gpus=8).weights < eight.weights
    for section in ({"model": {"offload": "experts"}}, {"parallel": {"experts": 2}}):
        with pytest.raises(RecipeError, match=r"is not counted for several GPUs"):
            plan_recipe(config, recipe(**section), gpus=8)


def test_a_change_that_costlier_ones_make_unneeded_is_left_out():
    """Shorter rows help a little; only the weights' quantization makes it fit, without them."""

    def need(tried):
        weights = {"none": 4000, "int8": 2100, "nf4": 1100}[tried.model.quantization]
        batch = 50 * tried.trainer["per_device_train_batch_size"]
        states = 20 if tried.trainer.get("optim") else 100
        return weights + batch + states + tried.data.max_length // 10

    start = recipe(data={"max_length": 2048}, trainer={"per_device_train_batch_size": 2})
    changes = remedies(start, "cuda", 1400, need)
    assert [(row.change, row.total, row.fits) for row in changes] == [
        ("trainer.per_device_train_batch_size: 1, gradient_accumulation_steps: 2", 4354, False),
        ("trainer.optim: adamw_8bit", 4274, False),
        ("model.quantization: nf4", 1374, True),
    ]
    sharded = remedies(start, "cuda", 1000, need, sharded=True)
    assert not sharded[-1].fits and not any("offload" in row.change for row in sharded)


def test_a_class_that_selects_tokens_by_value_has_no_plan():
    message = r"no memory plan for qwen4_exp_text: .* by their values \(aten.nonzero"
    with pytest.raises(UnsupportedModelError, match=message):
        plan_recipe(tiny_families.config("qwen4_exp_text"), recipe())
