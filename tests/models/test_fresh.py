"""Models from scratch: sizes from the config, random weights everywhere, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.errors import CheckpointError, RecipeError, UnsupportedModelError
from moe_finetune.models import family_of
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.models.from_scratch import check_vocabulary, fresh_config, fresh_model
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import run_recipe
from tests.support import tiny


@pytest.fixture
def without_weights(tiny_checkpoint, tmp_path):
    """A copy of a tiny checkpoint that has config and tokenizer only."""

    def copy(family: str) -> Path:
        ignored = shutil.ignore_patterns("*.safetensors*")
        return Path(shutil.copytree(tiny_checkpoint(family), tmp_path / family, ignore=ignored))

    return copy


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_every_weight_is_random_and_of_the_families_size(family, without_weights):
    folder = without_weights(family)
    config, _ = fresh_config(folder, {"num_experts_per_tok": 2, "num_hidden_layers": 2})
    model = fresh_model(config, seed=5)
    assert family_of(config).top_k(config) == 2 and len(model.get_decoder().layers) == 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    checked = set()
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if values.ndim == 1:
            continue  # norms begin at 1
        assert values.isfinite().all(), name
        assert float(values.std()) == pytest.approx(config.initializer_range, rel=0.12), name
        if values.ndim == 3:  # experts
            flat = values.flatten(1)
            assert float((flat - flat.roll(1, 0)).abs().max(1).values.min()) > 0, name
        checked.add(name.rsplit(".", 1)[-1])
    assert {"gate_up_proj", "down_proj", "weight"} <= checked
    same, other = fresh_model(config, seed=5), fresh_model(config, seed=6)
    router = next(n for n, _ in model.named_parameters() if n.endswith("gate.weight"))
    assert torch.equal(same.get_parameter(router), model.get_parameter(router))
    assert not torch.equal(other.get_parameter(router), model.get_parameter(router))


@pytest.mark.parametrize("shared", [None, 1])
def test_shared_experts_come_and_go(shared, without_weights):
    config, _ = fresh_config(without_weights("deepseek_moe"), {"n_shared_experts": shared})
    names = [name for name, _ in fresh_model(config, 0).named_parameters() if "shared" in name]
    assert bool(names) == (shared is not None)


def test_a_model_without_moe_layers_is_refused(without_weights):
    with pytest.raises(UnsupportedModelError, match="deepseek config has no layer with exp"):
        fresh_config(without_weights("deepseek_moe"), {"num_hidden_layers": 1})


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_a_key_are_the_key(key, without_weights):
    """Published files say num_experts, transformers 5 writes num_local_experts."""
    folder = without_weights("qwen3_moe")
    for written in ("num_experts", "num_local_experts"):
        raw = json.loads((folder / "config.json").read_text())
        raw = {k: v for k, v in raw.items() if k not in ("num_experts", "num_local_experts")}
        (folder / "config.json").write_text(json.dumps({**raw, written: 12}))
        config, _ = fresh_config(folder, {key: 7})
        assert family_of(config).places(config).num_experts == 7
        assert fresh_config(folder, {})[0].num_experts == 12


def test_a_tokenizer_that_is_too_large_is_refused(without_weights):
    folder = without_weights("qwen3_moe")
    with pytest.raises(CheckpointError, match=r"260 tokens, .* vocab_size is 99"):
        config, _ = fresh_config(folder, {"vocab_size": 99})
        check_vocabulary(config, load_tokenizer(folder), folder)


def recipe(path: Path | str, **sections) -> Recipe:
    model = {"path": str(path), "init": "random", **sections.pop("model", {})}
    values = {"lora": None, "data": {"train": "a.jsonl"}, **sections}
    return recipe_from_tree(
        Tree({"model": model, "method": "specialization_coupling_scratch", **values})
    )


def test_lora_is_on_by_default_so_it_must_be_turned_off():
    tree = {"model": {"path": "m", "init": "random"}, "data": {"train": "a.jsonl"}}
    with pytest.raises(RecipeError, match="set lora: null"):
        recipe_from_tree(Tree(tree))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_from_scratch_ends_with_an_ordinary_checkpoint(dtype, without_weights, tmp_path):
    folder = without_weights("deepseek_moe")
    data = tmp_path / "train.jsonl"
    rows = [{"text": f"{a} and {a} are {2 * a}. " * 3} for a in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"n_routed_experts": 10, "num_hidden_layers": 4, "n_shared_experts": None}
    run = run_recipe(
        recipe(
            folder,
            model={"config": config, "dtype": dtype},
            data={"train": str(data), "max_length": 64},
            trainer={
                "max_steps": 4,
                "per_device_train_batch_size": 4,
                "logging_steps": 1,
                "learning_rate": 0.01,
                "seed": 3,
            },
        ),
        tmp_path / "run",
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    assert train[-1]["loss"] < train[0]["loss"] - 0.3, "it learns"
    assert {"losses/load_balance", "losses/specialization"} <= train[0].keys()
    assert not (run / "adapter").exists()
    assert "moe-finetune" in (run / "merged" / "README.md").read_text()
    saved = json.loads((run / "merged" / "config.json").read_text())
    assert (saved["n_routed_experts"], saved["n_shared_experts"]) == (10, None)
    assert saved["dtype"] == dtype and saved["num_hidden_layers"] == 4
    trained = load_model(run / "merged")
    assert trained.dtype == getattr(torch, dtype)
    start = fresh_model(fresh_config(folder, config)[0], seed=3)
    begun = dict(start.named_parameters())
    assert {n for n, _ in trained.named_parameters()} == begun.keys()
    moved = {n for n, p in trained.named_parameters() if not torch.equal(p.float(), begun[n])}
    assert moved == begun.keys()
    distance = max(
        float((p.detach().float() - begun[n].detach()).abs().max())
        for n, p in trained.named_parameters()
    )
    assert distance < 0.08, "training began somewhere else than at these weights"
