"""The verb from end to end on tiny models, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moe_finetune import cli
from moe_finetune.checkpoint.loading import load_model
from moe_finetune.errors import RecipeError
from moe_finetune.upcycle.clustering import sizes_of
from moe_finetune.upcycle.recipe import load_upcycle_recipe
from tests.upcycle import dense

ROOT = Path(__file__).parents[2]
TRAINER = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1.0e-2}


def run(capsys, *arguments) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def write_recipe(folder: Path, **changes) -> Path:
    """A recipe with three experts over six categories, one seed and all four arms."""
    if not (folder / "dense").exists():
        dense.save("llama", folder / "dense", 1)
    recipe = {
        "dense": {"path": str(folder / "dense"), "dtype": "float32"},
        "texts": {"categories": dense.write_categories(folder / "texts", 6), "max_length": 24},
        "clusters": {"count": 3},
        "experts": {"trainer": TRAINER},
        "merge": {"top_k": 2, "router_std": 0.3},
        "router": {"trainer": {**TRAINER, "learning_rate": 0.1}},
        "finetune": {"trainer": {**TRAINER, "max_steps": 2}},
        "evaluation": {"texts": 2, "judgement": {"items": 4, "piece": 5}, "passages": 2},
        **changes,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished upcycle: its recipe and its folder; do not change them."""
    folder = tmp_path_factory.mktemp("upcycle")
    recipe = write_recipe(folder)
    assert cli.main(["upcycle", str(recipe), "--output", str(folder / "run")]) == 0
    return recipe, folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy that a test may change."""
    recipe, output = finished
    shutil.copytree(output, tmp_path / "run")
    return recipe, tmp_path / "run"


def made_at(output: Path) -> dict[str, int]:
    """When each step's mark was written."""
    marks = (output / "steps").glob("*.json")
    return {path.stem: path.stat().st_mtime_ns for path in marks if path.stem != "digests"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


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
    assert all(f"(Table {number})" in tables for number in (1, 2, 3, 4, 6))
    page = (output / "report/index.html").read_text()
    assert "Load of each expert in each layer" in page and "Categories of each expert" in page
    assert "repeated tokens go to their usual expert" in page
    assert "whose training texts have them most often" in page
    for chart in ("Fine-tuning of the arms", "Training of the experts", "Training of the routers"):
        assert f"{chart}: " in page
    assert not list((output / "work").rglob("*.safetensors")), "nothing is left at work"


def dense_of(recipe: Path) -> Path:
    return Path(yaml.safe_load(recipe.read_text())["dense"]["path"])


@pytest.mark.slow
def test_what_is_done_is_kept_and_what_changed_is_done_again(copied, capsys):
    recipe, output = copied
    before = made_at(output)
    copy = output.parent / "dense copied"  # other times and another place, the same content
    shutil.copytree(dense_of(recipe), copy, copy_function=shutil.copyfile)
    moved = f"dense.path={copy}"
    assert run(capsys, "upcycle", recipe, moved, "--output", output, "--resume")[0] == 0
    assert made_at(output) == before
    assert (output / "curves/seed-0.expert-2.jsonl").read_text().count('"kind": "train"') == 3
    other = ["upcycle", recipe, "router.trainer.max_steps=1", "--output", output, "--resume"]
    code, said = run(capsys, *other)
    assert code == 2 and "seed-0/router: made with other values of trainer" in said
    assert made_at(output) == before and "Nothing was deleted" in said
    code, _ = run(capsys, *other, "--replace")
    changed = {name for name, when in made_at(output).items() if before[name] != when}
    assert code == 0
    assert changed == {
        "seed-0.router",
        *(
            f"seed-0.{step}.{arm}"
            for step in ("arms", "measured")
            for arm in ("svmoe", "svmoe_balance")
        ),
    }
    assert run(capsys, "upcycle", recipe, "--output", output)[0] == 2, "without --resume"


@pytest.mark.slow
def test_a_removed_or_half_written_folder_is_made_again(copied, capsys):
    recipe, output = copied
    before = weights(output / "seed-0/merged")
    (output / "seed-0/merged/model.safetensors").unlink()
    (output / "steps/seed-0.merged.json").unlink()  # as a kill before the mark leaves it
    shutil.rmtree(output / "seed-0/measured/btx")
    assert run(capsys, "upcycle", recipe, "--output", output, "--resume")[0] == 0
    after = weights(output / "seed-0/merged")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (output / "seed-0/measured/btx/measured.json").is_file()


@pytest.mark.slow
def test_stages_run_alone_and_say_what_they_miss(finished, tmp_path, capsys):
    recipe, whole = finished
    output = tmp_path / "run"
    code, said = run(capsys, "upcycle", recipe, "--output", output, "--stage", "merge")
    assert code == 2 and "run --stage" in said and "first" in said
    for stage in ("cluster", "experts", "merge"):
        arguments = ["upcycle", recipe, "--output", output, "--stage", stage, "--resume"]
        if stage == "experts":
            for expert in (2, 0, 1):
                assert run(capsys, *arguments, "--expert", expert)[0] == 0
        assert run(capsys, *arguments)[0] == 0
    assert not (output / "seed-0/router").exists()
    ours, theirs = weights(output / "seed-0/merged"), weights(whole / "seed-0/merged")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "whoever ran it, and when"
    code, said = run(
        capsys,
        "upcycle",
        recipe,
        "clusters.seed=1",
        "--output",
        output,
        "--stage",
        "merge",
        "--resume",
    )
    assert code == 2 and "is out of date; run --stage" in said


@pytest.mark.slow
def test_a_killed_training_goes_on_and_ends_the_same(finished, tmp_path):
    recipe, _ = finished
    output = tmp_path / "run"
    saved = {**TRAINER, "save_steps": 1}
    recipe = write_recipe(tmp_path, dense={"path": str(dense_of(recipe)), "dtype": "float32"},
                          experts={"trainer": {**saved, "max_steps": 40}})  # fmt: skip
    command = [sys.executable, "-m", "moe_finetune.cli", "upcycle", str(recipe)]
    command += ["--output", str(output), "--stage", "experts"]
    for stage in ("dense", "cluster"):
        assert subprocess.run([*command[:-1], stage, "--resume"][: None if output.exists() else -1],
                              cwd=ROOT).returncode == 0  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--resume", "--expert", "1"], cwd=ROOT, env=environment)
    checkpoints = output / "work/seed-0/experts/1/checkpoints"
    while process.poll() is None and not list(checkpoints.glob("checkpoint-[2-9]")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    log = output / "work/seed-0/experts/1/metrics.jsonl"
    before = max(int(p.name.partition("-")[2]) for p in checkpoints.glob("checkpoint-*"))
    assert 0 < before < 40 and not (output / "seed-0/experts/1").exists()
    done = subprocess.run([*command, "--resume", "--expert", "1"], cwd=ROOT, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not log.exists(), "what a training needs goes when it is done"
    straight = tmp_path / "straight"
    shutil.copytree(output, straight, ignore=shutil.ignore_patterns("experts", "work"))
    (straight / "steps/seed-0.experts.1.json").unlink()
    command[command.index(str(output))] = str(straight)
    subprocess.run([*command, "--resume", "--expert", "1"], cwd=ROOT, env=environment, check=True)
    ours, theirs = (weights(folder / "seed-0/experts/1") for folder in (output, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_lora_processes_of_their_own_and_a_model_made_here(tmp_path, capsys):
    lora = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
    pretrain = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 40, "layers": 2}
    recipe = write_recipe(
        tmp_path,
        dense={"dtype": "float32", "pretrain": {**pretrain, "trainer": TRAINER}},
        experts={"trainer": TRAINER, "lora": lora, "processes": 2},
        finetune={"trainer": TRAINER, "lora": lora},
        arms={"svmoe": {"start": "router"}},
        evaluation={"texts": 1, "judgement": None, "passages": 1},
    )
    assert run(capsys, "upcycle", recipe, "--output", tmp_path / "run")[0] == 0
    seed = tmp_path / "run/seed-0"
    start, expert = weights(tmp_path / "run/dense"), weights(seed / "experts/2")
    assert start.keys() == expert.keys(), "the adapter is merged"
    name = "model.layers.0.mlp.down_proj.weight"
    change = torch.linalg.matrix_rank(expert[name] - start[name], rtol=1e-3)
    assert 0 < change <= 4
    untouched = "model.embed_tokens.weight"
    assert torch.equal(expert[untouched], start[untouched])
    routed, arm = weights(seed / "router"), weights(seed / "arms/svmoe")
    assert routed.keys() == arm.keys()
    name = "model.layers.1.block_sparse_moe.gate.weight"
    assert not torch.equal(routed[name], arm[name])


@pytest.mark.slow
def test_ready_experts_and_a_ready_table_are_used(finished, tmp_path, capsys):
    recipe, whole = finished
    ready = [str(whole / f"seed-0/experts/{n}") for n in (2, 1, 0)]
    table = whole / "clusters/table.safetensors"
    recipe = write_recipe(
        tmp_path,
        dense={"path": str(dense_of(recipe)), "dtype": "float32"},
        experts={"checkpoints": ready},
        clusters={"count": 3, "table": str(table)},
    )
    output = tmp_path / "run"
    for stage in ("cluster", "merge"):
        code, said = run(
            capsys, "upcycle", recipe, "--output", output, "--stage", stage,
            *(["--resume"] if output.exists() else []),
        )  # fmt: skip
        assert code == 0, said
    merged, expert = weights(output / "seed-0/merged"), weights(Path(ready[0]))
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert torch.equal(merged[name], expert["model.layers.0.mlp.gate_proj.weight"])
    held = load_file(output / "clusters/table.safetensors")["token_counts"]
    assert torch.equal(held, load_file(table)["token_counts"])


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
    assert list(recipe.arms) == ["dense", "btx", "btx_balance", "svmoe_balance", "svmoe"]
    assert (recipe.clusters.count, recipe.merge.top_k) == (8, 2)
    pinned = {names.index(name): n for name, n in recipe.clusters.pinned.items()}
    sizes = sizes_of(
        50, 8, pinned, bounds=recipe.clusters.bounds, exclusive=recipe.clusters.exclusive
    )
    assert sizes.least_N.tolist() == [1, 1, 1, 5, 5, 5, 5, 5]
    assert sizes.most_N.tolist() == [1, 1, 1, 12, 12, 12, 12, 12]


def test_the_miniature_is_the_papers_setting():
    recipe = load_upcycle_recipe([ROOT / "recipes/upcycle/miniature.yaml"])
    assert (recipe.clusters.count, recipe.merge.top_k) == (8, 2)
    assert list(recipe.arms) == ["dense", "btx", "btx_balance", "svmoe"]
    assert recipe.trainer_of(recipe.arms["dense"])["max_steps"] == 30 + 40
    assert recipe.trainer_of(recipe.arms["svmoe"])["max_steps"] == 40
    balance = recipe.arms["btx_balance"].method.terms["load_balance"]
    assert (balance.weight, balance.variant, balance.probabilities) == (0.01, "gshard", "topk")
    assert not recipe.arms["btx"].method.terms and len(recipe.seeds) >= 3


def test_dense_trains_as_long_as_an_expert_and_its_mixture(tmp_path):
    file = write_recipe(tmp_path)
    both = load_upcycle_recipe([file])
    assert list(both.arms) == ["dense", "btx", "btx_balance", "svmoe_balance", "svmoe"]
    assert both.trainer_of(both.arms["dense"])["max_steps"] == 3 + 2
    (tmp_path / "epochs").mkdir()
    file = write_recipe(
        tmp_path / "epochs", experts={"trainer": {"num_train_epochs": 2}}, finetune={}
    )
    found = load_upcycle_recipe([file])
    # An epoch of one of three experts is over a third of the texts; TRL's default is 3 epochs.
    assert found.trainer_of(found.arms["dense"])["num_train_epochs"] == pytest.approx(3 + 2 / 3)
    assert "num_train_epochs" not in found.trainer_of(found.arms["svmoe"])
    with pytest.raises(RecipeError, match=r"arms\.dense\.expert_steps: steps and epochs"):
        load_upcycle_recipe([file], ["finetune.trainer.max_steps=4"])
    own = load_upcycle_recipe([file], ["arms={dense: {start: dense, trainer: {max_steps: 7}}}"])
    assert own.trainer_of(own.arms["dense"])["max_steps"] == 7


# -- wrong input: exit code 2, one message, nothing written -----------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["clusters.count=7"], "6 categories are fewer than the 7 clusters"),
        (["clusters.cuont=2"], "clusters.cuont: unknown key; did you mean 'count'?"),
        (
            ["clusters.pinned.kid1=0"],
            "clusters.pinned.kid1: no such category; did you mean 'kind1'?",
        ),
        (["clusters.pinned.kind1=3"], "clusters are 0 to 2"),
        (["clusters.sizes=[3,4]"], "6 categories cannot be put into 3 clusters of 3 to 4"),
        (
            ["arms={a: {start: merged, expert_steps: true}}"],
            "expert_steps: the experts of 'merged' had theirs already",
        ),
        (["merge.top_k=4"], "merge.top_k: 4 is more than the 3 experts"),
        (["experts.checkpoints=[a]"], "experts.checkpoints: got 1, wanted one for each of 3"),
        (["experts.trainer.max_step=3"], "experts.trainer.max_step: unknown key"),
        (["experts.trainer.seed=3"], "experts.trainer.seed: cannot be set here: set `seeds`"),
        (["dense.path=null"], "wanted either `path`"),
        (["texts.corpus=python"], "wanted either `categories`"),
        (["seeds=[1,1]"], "seeds: wanted at least one number, each once"),
        (["arms.one={start: dense, method: erc}"], "has no router and takes no terms"),
        (["arms.one.start=nowhere"], "arms.one.start: must be 'dense'"),
        (["arms.one two.start=dense"], "wanted a name of a-z, 0-9 and _"),
        (["texts.categories.kind0=./nowhere.jsonl"], "there is no data file or folder"),
        (["dense.path=./nowhere"], "nowhere: no such folder"),
    ],
)
def test_a_wrong_recipe_ends_with_2(tmp_path, monkeypatch, capsys, overrides, said):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "given")
    code, err = run(capsys, "upcycle", recipe, *overrides, "--output", tmp_path / "run")
    assert code == 2 and said in err, err
    assert "Traceback" not in err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias is true, and a Mixtral has no biases"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' cannot become a MoE here"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' cannot become a MoE here"),
    ],
)
def test_a_dense_model_without_a_moe_ends_with_2(tmp_path, capsys, changes, said):
    recipe = write_recipe(tmp_path)
    config = tmp_path / "dense" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and said in err, err
    assert not (tmp_path / "run").exists()


def test_missing_questions_and_several_ranks_end_with_2(tmp_path, capsys, monkeypatch):
    recipe = write_recipe(tmp_path)
    ask = f"evaluation.judgement.file={tmp_path / 'gone.jsonl'}"
    code, err = run(capsys, "upcycle", recipe, ask, "--output", tmp_path / "run")
    assert code == 2 and "gone.jsonl" in err
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "experts.processes" in err
    assert not (tmp_path / "run").exists()


def test_too_many_pins_end_with_2(tmp_path, capsys):
    pinned = {"kind0": 1, "kind1": 1, "kind2": 1}
    recipe = write_recipe(tmp_path, clusters={"count": 3, "pinned": pinned})
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "cluster 1 gets 3 categories, and clusters hold 2 to 2" in err
    assert not (tmp_path / "run").exists()


def test_an_unknown_stage_or_expert_ends_with_2(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    for arguments, said in (
        (["--stage", "mrege"], "unknown stage 'mrege'; did you mean 'merge'?"),
        (["--stage", "experts", "--expert", "3"], "--expert 3: wanted 0 to 2"),
        (["--expert", "0"], "with --stage experts"),
        (["--resume"], "holds no upcycle"),
    ):
        code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run", *arguments)
        assert code == 2 and said in err, err


def _other_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "spoil", "said"),
    [
        ({}, _other_tokenizer, "their tokenizers differ"),
        ({"intermediate_size": 96}, None, "intermediate_size is 96 and 112"),
    ],
)
def test_experts_that_differ_end_with_2(tmp_path, capsys, changes, spoil, said):
    dense.save("llama", tmp_path / "other", 2, **changes)
    if spoil is not None:
        spoil(tmp_path / "other")
    ready = [str(tmp_path / name) for name in ("dense", "dense", "other")]
    recipe = write_recipe(tmp_path, experts={"checkpoints": ready})
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and said in err, err
    assert not (tmp_path / "run").exists()


def test_experts_of_another_tokenizer_than_the_texts_end_with_2(tmp_path, capsys):
    dense.save("llama", tmp_path / "other", 2)
    _other_tokenizer(tmp_path / "other")
    recipe = write_recipe(tmp_path, experts={"checkpoints": [str(tmp_path / "other")] * 3})
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "has another tokenizer than the dense model" in err
    assert not (tmp_path / "run").exists()


def test_a_table_of_another_vocabulary_ends_with_2(finished_table, tmp_path, capsys):
    recipe = write_recipe(tmp_path, clusters={"count": 3, "table": str(finished_table)})
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "and this model has 400 tokens and 3 experts" in err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished_table(tmp_path):
    import numpy as np

    from moe_finetune.upcycle.frequencies import count_table

    counts_CV = np.ones((3, 111), np.int64)
    count_table(counts_CV, np.arange(3), 3, "t").save(tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


def test_texts_shorter_than_a_row_end_with_2(tmp_path, capsys):
    recipe = write_recipe(tmp_path, texts={
        "categories": dense.write_categories(tmp_path / "texts", 3, texts=3), "max_length": 4000,
    })  # fmt: skip
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "training tokens are less than one row" in err
