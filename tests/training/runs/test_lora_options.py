"""A whole run with the options that people tune LoRA with, stopped and resumed."""

import json

import pytest

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import AdapterError
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import run_recipe
from moe_finetune.training.before.prepare import prepare
from moe_finetune.training.run.train import continue_adapter
from moe_finetune.training.run.trainer import build_trainer
from tests.checkpoint import helpers
from tests.checkpoint.helpers import EXPERTS, load, logits
from tests.support import tiny

ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base") / "qwen3_moe")


@pytest.fixture
def recipe(base, tmp_path):
    def make(lora=None, router="lora", **trainer):
        rows = [{"text": f"row {n} of {n * n} letters " * 3} for n in range(24)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {
            "model": {"path": str(base), "dtype": "float32"},
            "method": {"preset": "orthogonal_variance"},
            "router": {"train": router},
            "lora": {"rank": 4, "alpha": 8, "parts": {"experts": {"rank": 2}}, **(lora or {})},
            "data": {"train": str(tmp_path / "a.jsonl"), "max_length": 64},
            "trainer": {
                "max_steps": 4,
                "save_steps": 2,
                "per_device_train_batch_size": 3,
                "learning_rate": 1e-2,
                "report_to": [],
                **trainer,
            },
        }
        return recipe_from_tree(Tree(tree))

    return make


def test_neftune_reaches_the_trainer(recipe, base, tmp_path):
    from datasets import Dataset

    made = recipe(neftune_noise_alpha=7.0)
    model = add_lora(load(base), made.lora, made.router.train)
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4)
    trainer, callback = build_trainer(made, tmp_path, model, tiny.tokenizer(), rows, None)
    callback.close()
    assert trainer.neftune_noise_alpha == 7.0


@pytest.mark.parametrize(("router", "told"), [("full", True), ("lora", False)])
def test_a_full_router_is_named_before_training(recipe, router, told, caplog):
    made = recipe(router=router)
    with caplog.at_level("INFO", logger="moe_finetune"):
        prepare(made)
    assert ("set router.train to lora or frozen" in caplog.text) == told


def test_routers_that_no_loss_trains_are_named_before_training(recipe, caplog):
    changes = {"method": {"preset": "none"}, "router": {"train": "auto"}}
    made = recipe_from_tree(Tree({**recipe().to_mapping(), **changes}))
    with caplog.at_level("INFO", logger="moe_finetune"):
        prepare(made)
    assert caplog.text.count("router.train: frozen: no loss of the method trains routers") == 1


@pytest.mark.parametrize("maker", ["peft", "unsloth", "rank_of_a_part", "router"])
def test_training_goes_on_from_an_adapter(base, maker, tmp_path):
    """Before the first step the model computes what base and adapter compute."""
    options = {
        "peft": {"target_parameters": list(EXPERTS)},
        "unsloth": {"target_parameters": list(EXPERTS)},
        "rank_of_a_part": {
            "target_parameters": list(EXPERTS), "rank_pattern": {"down_proj": 3},
            "use_rslora": True,
        },
        "router": {"target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    }[maker]  # fmt: skip
    adapter = helpers.adapter(base, tmp_path / "adapter", **options)
    if maker == "unsloth":
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["lora_B_layout"] = "grouped_by_expert"
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    merge_adapter(base, adapter, tmp_path / "merged")
    wanted = logits(load(tmp_path / "merged"))
    lora = LoraSection(rank=6, alpha=5.0, targets=["attention", "experts"])
    model = add_lora(load(base), lora, "lora" if maker == "router" else "frozen")
    continue_adapter(model, adapter, open_checkpoint(base))
    assert (logits(model.eval()) - wanted).norm() < 1e-5 * wanted.norm()
    assert (logits(load(base)) - wanted).norm() > 0.02 * wanted.norm()


def test_an_adapter_that_the_recipe_cannot_go_on_from(base, recipe, tmp_path):
    adapter = helpers.adapter(base, tmp_path / "adapter")
    for lora, part in (
        (LoraSection(rank=6, alpha=6.0, targets=["attention"]), "does not train"),
        (LoraSection(rank=3, alpha=6.0), "has rank 4, but the recipe gives it 3"),
    ):
        with pytest.raises(AdapterError, match=part):
            continue_adapter(add_lora(load(base), lora, "lora"), adapter, open_checkpoint(base))
    with pytest.raises(AdapterError, match="no such adapter folder"):
        prepare(recipe({"start": str(tmp_path / "nowhere")}))


def test_a_run_goes_on_from_an_adapter(base, recipe, tmp_path):
    adapter = helpers.adapter(base, tmp_path / "adapter")
    lora = {"start": str(adapter), "parts": {}, "targets": ["attention", "experts"]}
    output = run_recipe(recipe(lora, learning_rate=0.0, max_steps=1), tmp_path / "run")
    merge_adapter(base, adapter, tmp_path / "merged")
    wanted = logits(load(tmp_path / "merged"))
    assert (logits(load(output / "merged")) - wanted).norm() < 1e-5 * wanted.norm()
