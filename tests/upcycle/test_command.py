"""The verb from end to end on tiny models, through the command line."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.errors import RecipeError
from moe_finetune.upcycle.clustering import sizes_of
from moe_finetune.upcycle.schema import load_upcycle_recipe
from tests.conftest import ROOT
from tests.support import tiny
from tests.upcycle.small import TRAINER, dense_of, run, weights, write_recipe


@pytest.mark.slow
def test_every_stage_leaves_what_it_says(finished):
    recipe, output = finished
    clusters = json.loads((output / "clusters/clusters.json").read_text())["cluster"]
    for pair in (0, 2, 4):
        assert clusters[f"kind{pair}"] == clusters[f"kind{pair + 1}"], "pairs share letters"
    assert sorted(clusters.values()) == [0, 0, 1, 1, 2, 2]
    seed = output / "seed-0"
    start, experts = weights(dense_of(recipe)), [weights(seed / f"experts/{n}") for n in range(3)]
    up = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(experts[0][up], start[up])
    assert not torch.equal(experts[0][up], experts[1][up])
    merged = weights(seed / "merged")
    block = "model.layers.1.block_sparse_moe"
    assert all(
        torch.equal(merged[f"{block}.experts.{n}.w3.weight"], experts[n][up]) for n in (0, 1)
    )

    routed = weights(seed / "router")
    moved = {name for name in merged if not torch.equal(merged[name], routed[name])}
    assert moved == {f"model.layers.{n}.block_sparse_moe.gate.weight" for n in range(3)}

    results = json.loads((output / "results.json").read_text())
    assert list(results["arms"]) == ["Dense", "BTX", "BTX + balance", "SvMoE + balance", "SvMoE"]
    for name in ("btx", "btx_balance", "svmoe"):
        model = load_model(seed / "arms" / name)
        assert model.config.num_local_experts == 3 and model.config.num_experts_per_tok == 2
    assert json.loads((seed / "arms/dense/config.json").read_text())["model_type"] == "llama"
    arms = [weights(seed / "arms" / name) for name in ("btx", "btx_balance")]
    assert any(not torch.equal(arms[0][name], arms[1][name]) for name in arms[0]), "balance acts"
    tables = (output / "tables.md").read_text()
    assert "(Tables 1, 2, 4 and 6)" in tables and "(Tables 3 and 5)" in tables
    assert "| test texts: |" in tables and "| kind5: |" in tables
    counts_VN = load_file(output / "clusters/table.safetensors")["token_counts"]
    for expert, count in enumerate(counts_VN.sum(0).tolist(), 1):
        assert f"| {expert} | kind" in tables and f" | {count:,} | " in tables
    page = (output / "report/index.html").read_text()
    assert "Load of each expert in each layer" in page
    assert "Categories and tokens of each cluster" in page
    for text in (tables, page):
        assert "Dense 1.156, BTX 1.169, SvMoE 1.199" in text
    assert "Training loss ends between" in page and "Dense model, experts and routers" in page
    for training in ("expert-0", "expert-2", "router"):
        assert f"<td>{training}</td>" in page
    assert not list((output / "work").rglob("*.safetensors")), "nothing is left at work"


@pytest.mark.slow
def test_a_model_that_is_pretrained_first(tmp_path, capsys):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    pretrain = {"tokenizer": str(tmp_path / "tokenizer"), "hidden_size": 64, "layers": 2}
    recipe = write_recipe(
        tmp_path,
        dense={
            "dtype": "float32",
            "pretrain": {**pretrain, "intermediate_size": 40, "trainer": TRAINER},
        },
        arms={"svmoe": {"start": "router"}},
        evaluation={"texts": 1},
    )
    assert run(capsys, "upcycle", recipe, "--output", tmp_path / "run")[0] == 0
    seed = tmp_path / "run/seed-0"
    start, expert = weights(tmp_path / "run/dense"), weights(seed / "experts/2")
    assert start.keys() == expert.keys()
    routed, arm = weights(seed / "router"), weights(seed / "arms/svmoe")
    assert routed.keys() == arm.keys()
    name = "model.layers.1.block_sparse_moe.gate.weight"
    assert not torch.equal(routed[name], arm[name])


def test_a_resolved_recipe_reads_back_equal(tmp_path):
    recipe = load_upcycle_recipe(
        [write_recipe(tmp_path)], ["seeds=[3,4]", "clusters.pinned.kind1=2"]
    )
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    again = load_upcycle_recipe([tmp_path / "resolved.yaml"])
    assert again.to_mapping() == recipe.to_mapping()
    assert again.arms["btx_balance"].method.terms["load_balance"].weight == 0.01
    assert again.clusters.pinned == {"kind1": 2} and again.clusters.count == 3


def test_the_papers_recipe_takes_a_file_of_ones_own(tmp_path):
    own = tmp_path / "my.yaml"
    names = [f"kind{n}" for n in range(50)]
    own.write_text(
        yaml.safe_dump(
            {
                "dense": {"path": "dense"},
                "texts": {"categories": dict.fromkeys(names, "texts.jsonl")},
                "clusters": {"pinned": {"kind3": 0, "kind7": 1, "kind9": 2}},
            }
        )
    )
    recipe = load_upcycle_recipe([ROOT / "recipes/upcycle/paper.yaml", own])
    assert list(recipe.arms) == [
        "dense", "dense_experts_rate", "btx", "btx_steps", "btx_router_rate", "btx_balance",
        "svmoe_balance", "svmoe",
    ]  # fmt: skip
    assert (recipe.clusters.count, recipe.merge.top_k) == (8, 2)
    pinned = {names.index(name): n for name, n in recipe.clusters.pinned.items()}
    sizes = sizes_of(
        50, 8, pinned, bounds=recipe.clusters.sizes, exclusive=recipe.clusters.exclusive
    )
    assert sizes.least_N.tolist() == [1, 1, 1, 5, 5, 5, 5, 5]
    assert sizes.most_N.tolist() == [1, 1, 1, 12, 12, 12, 12, 12]


def test_the_papers_clusters_are_those_of_its_table_5(tmp_path):
    folder = ROOT / "recipes/upcycle"
    pinned = yaml.safe_load((folder / "paper_categories.yaml").read_text())["clusters"]["pinned"]
    mine = tmp_path / "my.yaml"
    texts = {"categories": dict.fromkeys(pinned, "texts.jsonl")}
    mine.write_text(yaml.safe_dump({"dense": {"path": "dense"}, "texts": texts}))
    paths = [folder / "paper.yaml", folder / "paper_categories.yaml", mine]
    recipe = load_upcycle_recipe(paths)
    section = recipe.clusters
    numbers = dict(enumerate(section.pinned.values()))
    sizes = sizes_of(50, 8, numbers, bounds=section.sizes, exclusive=section.exclusive)
    assert sizes.least_N.tolist() == sizes.most_N.tolist() == [10, 5, 10, 10, 12, 1, 1, 1]
    assert [section.pinned[name] for name in ("Criminal", "Health", "Local Finance")] == [0, 4, 7]


def test_the_miniature_is_the_papers_setting():
    texts = dict.fromkeys((f"kind{n}" for n in range(24)), "texts.jsonl")
    recipe = load_upcycle_recipe(
        [ROOT / "recipes/upcycle/miniature.yaml"],
        [f"texts.categories={texts}", "dense.pretrain.tokenizer=tokenizer"],
    )
    assert (recipe.clusters.count, recipe.merge.top_k) == (8, 2)
    assert list(recipe.arms) == [
        "dense", "dense_experts_rate", "btx", "btx_steps", "btx_router_rate", "btx_balance",
        "svmoe_balance", "svmoe",
    ]  # fmt: skip
    rates = [recipe.trainer_of(recipe.arms[n])["learning_rate"] for n in list(recipe.arms)[:2]]
    assert rates == [5e-4, recipe.experts.trainer["learning_rate"]]
    assert recipe.trainer_of(recipe.arms["dense"])["max_steps"] == 30 + 40
    assert recipe.trainer_of(recipe.arms["svmoe"])["max_steps"] == 40
    router = recipe.router.trainer
    steps = recipe.trainer_of(recipe.arms["btx_steps"])["max_steps"]
    assert steps == router["max_steps"] + 40, "as many as SvMoE's router stage and fine-tuning"
    assert recipe.arms["btx_router_rate"].router_learning_rate == router["learning_rate"]
    balance = recipe.arms["btx_balance"].method.terms["load_balance"]
    assert (balance.weight, balance.variant, balance.probabilities) == (0.01, "gshard", "topk")
    assert not recipe.arms["btx"].method.terms and len(recipe.seeds) >= 3


def test_dense_trains_as_long_as_an_expert_and_its_mixture(tmp_path):
    file = write_recipe(tmp_path)
    both = load_upcycle_recipe([file])
    assert both.trainer_of(both.arms["dense"])["max_steps"] == 3 + 2
    (tmp_path / "epochs").mkdir()
    epochs = {"trainer": {"num_train_epochs": 2}}
    file = write_recipe(tmp_path / "epochs", experts=epochs, finetune={})
    recipe = load_upcycle_recipe([file])
    # An epoch of one of three experts is over a third of the texts; TRL's default is 3 epochs.
    trainer = recipe.trainer_of(recipe.arms["dense"])
    assert trainer["num_train_epochs"] == pytest.approx(3 + 2 / 3)
    assert "num_train_epochs" not in recipe.trainer_of(recipe.arms["svmoe"])
    with pytest.raises(RecipeError, match=r"arms\.dense\.expert_steps: steps and epochs"):
        load_upcycle_recipe([file], ["finetune.trainer.max_steps=4"])
    chosen = load_upcycle_recipe([file], ["arms.dense.trainer.max_steps=7"])
    assert chosen.trainer_of(chosen.arms["dense"])["max_steps"] == 7
