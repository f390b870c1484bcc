"""What a resumed run reads must be what it began with; content counts, not paths or times."""

import json
import shutil

import pytest
import torch
from datasets import Dataset, DatasetDict, load_from_disk
from safetensors.torch import load_file, save_file

from moe_finetune.data.sources import content_hash
from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.io.hub import continue_with
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models import config_and_tokenizer
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import plan_run, run_recipe
from moe_finetune.training.run.checkpoint_and_rows import open_start
from moe_finetune.training.run.input_fingerprints import _module, fingerprints
from moe_finetune.training.save_and_resume.training_state import checkpoints
from tests.checkpoint.helpers import adapter

ROWS = [{"text": f"word {number} " * 5} for number in range(7)]


def recipe(folder, **sections):
    tree = {
        "model": {"path": str(folder / "qwen3_moe"), "dtype": "float32"},
        "method": {"preset": "none"},
        "lora": {"rank": 3, "alpha": 6},
        "data": {
            "train": str(folder / "train.jsonl"),
            "validation": str(folder / "held_out.jsonl"),
            "max_length": 24,
        },
        "trainer": {"max_steps": 4, "save_steps": 2, "report_to": [], "eval_steps": 2},
        "export": {"merge": False},
    }
    for name, values in sections.items():
        tree[name] = {**tree[name], **values}
    return recipe_from_tree(Tree(tree))


@pytest.fixture
def folder(tmp_path, tiny_checkpoint):
    shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "qwen3_moe")
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "held_out.jsonl", ROWS[:3])
    return tmp_path


def change_weight(base, name_part, row):
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name_part in name)
    tensors[name][row] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def change_json(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


CHANGES = {
    "data.train": lambda f: write_jsonl(f / "train.jsonl", ROWS[::-1]),
    "data.validation": lambda f: write_jsonl(f / "held_out.jsonl", ROWS[1:4]),
    "data.chat_template": lambda f: (f / "chat.jinja").write_text("{{ messages }}."),
    "model.path": lambda f: change_weight(f / "qwen3_moe", "experts.2.down", 1),
    "model.path, config": lambda f: change_json(f / "qwen3_moe/config.json", rope_theta=7.0),
    "model.tokenizer": lambda f: change_json(f / "qwen3_moe/tokenizer_config.json", extra=1),
    "lora.start": lambda f: change_weight(f / "start", "lora_A", 0),
    "lora.experts": lambda f: (f / "chosen.json").write_text('{"1": [2]}'),
    "method.terms.supervised_routing.table": lambda f: save_file(
        {"token_frequencies": torch.ones(3, 2) / 2}, f / "table.safetensors"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_input_has_a_fingerprint_of_its_content(folder, change):
    (folder / "chat.jinja").write_text("{{ messages }}")
    (folder / "chosen.json").write_text('{"1": [3]}')
    save_file({"token_frequencies": torch.eye(2)}, folder / "table.safetensors")
    adapter(folder / "qwen3_moe", folder / "start")
    key = change.partition(",")[0]
    lora = {
        "lora.start": {"start": str(folder / "start")},
        "lora.experts": {"experts": str(folder / "chosen.json")},
    }
    table = {"supervised_routing": {"weight": 0.1, "table": str(folder / "table.safetensors")}}

    def prints():
        return fingerprints(
            open_start(
                recipe(
                    folder,
                    lora=lora.get(key, {}),
                    data={"chat_template": str(folder / "chat.jinja")},
                    method={"terms": table} if key.startswith("method") else {},
                )
            )
        )

    before = prints()
    assert key in before and prints() == before
    CHANGES[change](folder)
    after = prints()
    assert {name for name in before if before[name] != after[name]} == {key}


def test_every_expert_of_a_stacked_tensor_counts(tmp_path):
    """Also of a checkpoint so large that only parts of each tensor are read."""
    from moe_finetune.checkpoint import weight_files
    from moe_finetune.training.run.input_fingerprints import _of_slices

    save_file({"w": torch.zeros(9, 5, 4), "flat": torch.zeros(7)}, tmp_path / "a.safetensors")
    infos = list(files_of(tmp_path / "a.safetensors"))
    seen = {_of_slices(infos)}
    for expert in range(9):
        weights = torch.zeros(9, 5, 4)
        weights[expert] = 1
        save_file({"w": weights, "flat": torch.zeros(7)}, tmp_path / "a.safetensors")
        seen.add(_of_slices(infos))
    assert len(seen) == 10 and weight_files._SLICE_BYTES == 4096


def files_of(file):
    from moe_finetune.io.safetensors_header import read_header

    return read_header(file, CheckpointError).tensors.values()


@pytest.fixture
def stopped(folder):
    """A run that was killed after its first checkpoint."""
    run = RunFolder(run_recipe(recipe(folder), folder / "run"))
    shutil.rmtree(run.adapter)
    shutil.rmtree(checkpoints(run.checkpoints)[0])
    return run


def test_a_changed_input_is_refused_and_a_copy_resumes(folder, stopped, caplog):
    train = folder / "train.jsonl"
    write_jsonl(train, [*ROWS, {"text": "one more"}])
    for resume in (run_recipe, plan_run):
        with pytest.raises(RecipeError, match=r"data\.train: .*train\.jsonl\n.*--output"):
            resume(recipe(folder), stopped.path, resume=True)
    write_jsonl(train, ROWS)
    write_jsonl(folder / "held_out.jsonl", ROWS[2:5])
    with pytest.raises(RecipeError, match=r"data\.validation: "):
        chooses = recipe(folder, trainer={"load_best_model_at_end": True, "eval_strategy": "steps"})
        stopped.recipe.write_text(chooses.to_yaml())
        run_recipe(chooses, stopped.path, resume=True)
    stopped.recipe.write_text(recipe(folder).to_yaml())
    change_json(stopped.environment, packages={"torch": "2.4", "numpy": "1"})
    shutil.copytree(folder / "qwen3_moe", folder / "copy")
    shutil.rmtree(folder / "qwen3_moe")
    shutil.move(folder / "copy", folder / "qwen3_moe")
    run_recipe(recipe(folder), stopped.path, resume=True)
    assert stopped.trained
    assert "data.validation has other rows" in caplog.text
    assert "torch 2.4, now" in caplog.text and "numpy" not in caplog.text


def test_the_same_bytes_resume_under_another_path_and_a_default_may_be_written_out(
    folder, stopped, monkeypatch
):
    environment = json.loads(stopped.environment.read_text())
    change_json(stopped.environment, packages={"torch": "2.4"})
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("qwen3_moe", "train.jsonl", "held_out.jsonl"):
        shutil.move(folder / name, elsewhere / name)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(RecipeError, match=r"trainer\.weight_decay: not set, now 0\.1"):
        run_recipe(recipe(elsewhere, trainer={"weight_decay": 0.1}), stopped.path, resume=True)
    moved = recipe(
        elsewhere,
        trainer={"weight_decay": 0.0, "gradient_checkpointing": False},
        model={"path": "qwen3_moe"},
        data={"train": "train.jsonl"},
    )
    run_recipe(moved, stopped.path, resume=True)
    assert stopped.trained
    noted = json.loads(stopped.environment.read_text())
    assert noted["packages"] == {"torch": "2.4"}
    assert [later["packages"] for later in noted["resumed"]] == [environment["packages"]]


def test_values_that_are_no_paths_are_no_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = fingerprints(open_start(recipe(folder, method={"preset": "aux_loss"})))
    for name in ("all", "sum", "batch", "switch"):
        (folder / name).write_text("not an input")
    assert fingerprints(open_start(recipe(folder, method={"preset": "aux_loss"}))) == before


def test_a_saved_data_set_is_the_files_that_its_state_names(folder):
    saved = folder / "saved"
    Dataset.from_list(ROWS).save_to_disk(str(saved))
    before = content_hash(str(saved))
    load_from_disk(str(saved)).filter(lambda row: "3" not in row["text"])
    assert list(saved.glob("cache-*.arrow")) and content_hash(str(saved)) == before
    both = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])})
    both.save_to_disk(str(folder / "both"))
    before = content_hash(str(folder / "both"))
    assert before != content_hash(str(folder / "both"), "test")
    (folder / "both" / "train" / "data-00000-of-00001.arrow").write_bytes(b"other")
    assert content_hash(str(folder / "both")) != before


def test_a_plugin_is_every_file_of_its_package(tmp_path, monkeypatch):
    package = tmp_path / "losses_of_mine"
    (package / "deeper").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    formula = package / "deeper" / "formula.py"
    formula.write_text("FACTOR = 1")
    monkeypatch.syspath_prepend(tmp_path)
    before = _module("losses_of_mine")
    formula.write_text("FACTOR = -1000")
    assert _module("losses_of_mine") != before


def test_a_share_that_is_held_out_is_an_input(folder):
    """Its side of each row follows from rows, share and seed; it resumes, and another does not."""
    held_out = recipe(folder, data={"validation": 0.3})
    run = RunFolder(run_recipe(held_out, folder / "held"))
    noted = json.loads(run.inputs.read_text())["inputs"]
    assert noted["data.validation"] not in (None, noted["data.train"])
    assert any("eval_loss" in line for line in run.metrics.read_text().splitlines())
    run_recipe(held_out, run.path, resume=True)
    for change in ({"data": {"validation": 0.4}}, {"data": {"validation": None}}):
        with pytest.raises(RecipeError, match=r"data\.validation: 0\.3, now"):
            run_recipe(recipe(folder, **change), run.path, resume=True)


def test_a_checkpoint_of_another_run_is_refused(folder, stopped):
    other = RunFolder(run_recipe(recipe(folder, trainer={"seed": 5}), folder / "other"))
    newest = checkpoints(other.checkpoints)[0]
    strange = shutil.copytree(newest, stopped.checkpoints / newest.name)
    with pytest.raises(CheckpointError, match=r"checkpoint-4: was written by another run; move"):
        run_recipe(recipe(folder), stopped.path, resume=True)
    shutil.rmtree(strange)
    run_recipe(recipe(folder), stopped.path, resume=True)
    assert stopped.trained


def test_a_run_without_fingerprints_resumes_with_a_line(folder, stopped, caplog):
    stopped.inputs.unlink()
    run_recipe(recipe(folder), stopped.path, resume=True)
    lines = [r.message for r in caplog.records if "did not note the content" in r.message]
    assert len(lines) == 1 and stopped.trained and stopped.inputs.is_file()


def test_a_hub_id_is_read_at_the_commit_of_the_start(tmp_path, monkeypatch, tiny_checkpoint):
    """Also after the branch has moved on, as the cache of the hub's client stores it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--some--model"
    old, new = "a1" * 20, "b2" * 20
    for commit in (old, new):
        shutil.copytree(tiny_checkpoint("olmoe"), cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(old)
    monkeypatch.setattr("moe_finetune.io.hub._commits", {})
    assert config_and_tokenizer.local_folder("some/model").name == old
    (cached / "refs" / "main").write_text(new)
    assert config_and_tokenizer.local_folder("some/model").name == old
    monkeypatch.setattr("moe_finetune.io.hub._commits", {})
    assert config_and_tokenizer.local_folder("some/model").name == new
    continue_with({"some/model@": old})
    assert config_and_tokenizer.local_folder("some/model").name == old
