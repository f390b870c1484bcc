"""Wrong input of the verb ends with 2; wrong recipes are in training/runs/refusals.json."""

import pytest

from tests.support import tiny
from tests.upcycle import dense
from tests.upcycle.small import run, write_recipe

IDS = len(tiny.tokenizer())
PINNED = {"count": 3, "pinned": {f"kind{n}": n % 3 for n in range(6)}}


def test_several_ranks_end_with_2(tmp_path, capsys, monkeypatch):
    recipe = write_recipe(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "CUDA_VISIBLE_DEVICES" in err
    assert not (tmp_path / "run").exists()


def test_without_an_earlier_upcycle_resume_ends_with_2(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run", "--resume")
    assert code == 2 and "has no upcycle" in err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_with_a_recipe_of_the_users_is_left_alone(resume, tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    before = recipe.read_bytes()
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path, *resume)
    assert code == 2 and "contains other files; choose another --output" in err
    assert recipe.read_bytes() == before and not (tmp_path / "made").exists()


def test_a_tokenizer_with_more_ids_than_the_model_ends_with_2(tmp_path, capsys):
    dense.save("llama", tmp_path / "dense", 1, vocab_size=IDS - 1)
    code, err = run(capsys, "upcycle", write_recipe(tmp_path), "--output", tmp_path / "run")
    assert code == 2 and f"ids up to {IDS - 1}, but the model's vocab_size is {IDS - 1}" in err
    assert not (tmp_path / "run").exists()


def test_texts_shorter_than_a_row_end_with_2(tmp_path, capsys):
    recipe = write_recipe(tmp_path, texts={
        "categories": dense.write_categories(tmp_path / "texts", 3, texts=3), "max_length": 4000,
    })  # fmt: skip
    code, err = run(capsys, "upcycle", recipe, "--output", tmp_path / "run")
    assert code == 2 and "training tokens are fewer than one row of" in err
