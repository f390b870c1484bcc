"""The steps of a run that are not a module of their own."""

import shutil
import weakref

import pytest
import torch

from moe_finetune.errors import RecipeError
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.run import merge, run_recipe
from moe_finetune.training.run.checkpoint_and_rows import open_start, start_model
from tests.checkpoint.helpers import adapter as random_adapter
from tests.support.recipes import recipe_of

pytestmark = pytest.mark.usefixtures("warm")  # for rehearsals of runs


@pytest.mark.parametrize(
    ("lora", "dtype"), [(None, torch.float32), ({"rank": 3, "alpha": 6}, torch.bfloat16)]
)
def test_weights_that_train_are_float32(lora, dtype, tiny_checkpoint):
    base = tiny_checkpoint("qwen3_moe")
    recipe = recipe_of(base, "a.jsonl", lora=lora, model={"dtype": "bfloat16"})
    model = start_model(open_start(recipe))
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_before_is_measured_before_training_and_evaluations_change_nothing(
    tiny_checkpoint, tmp_path
):
    """The first evaluation is of step 0, gives the base's loss, and leaves the adapter's bytes."""
    rows = [{"text": f"{word} " * (5 + n)} for n, word in enumerate(["ab", "cde", "f", "ghi"] * 2)]
    for name, part in (("train", rows[:5]), ("held_out", rows[5:])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)

    def run(name: str, **trainer):
        recipe = recipe_of(
            tiny_checkpoint("qwen3_moe"),
            tmp_path / "train.jsonl",
            lora={"dropout": 0.2},
            router={"train": "frozen"},
            data={"validation": str(tmp_path / "held_out.jsonl"), "packing": False},
            trainer={"max_steps": 3, **trainer},
            export={"merge": False},
        )
        return run_recipe(recipe, tmp_path / name)

    def losses(folder):
        rows = read_log(folder / "metrics.jsonl")
        return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}

    first, without = run("first"), run("without", eval_on_start=False)
    assert losses(first).keys() == {0, 3} and losses(without).keys() == {3}
    untrained = run("untrained", learning_rate=0.0, eval_on_start=False)
    assert losses(first)[0] == pytest.approx(losses(untrained)[3], rel=1e-6)
    assert losses(first)[0] != losses(first)[3] == losses(without)[3]
    often = run("often", eval_strategy="steps", eval_steps=1)
    assert losses(often).keys() == {0, 1, 2, 3}
    weights = {
        (folder / "adapter" / "adapter_model.safetensors").read_bytes()
        for folder in (first, without, often)
    }
    assert len(weights) == 1
    with pytest.raises(RecipeError, match=r"metric_for_best_model: 'f1' is not .* eval_loss"):
        run("unknown", metric_for_best_model="f1")
    assert not (tmp_path / "unknown").exists()  # the toy's evaluation has no such metric either


def test_the_base_is_opened_once(tiny_checkpoint, tmp_path, monkeypatch):
    """From the checks to the verified merge: config, headers and tokenizer are read once;
    the merge compares the tokenizers again.

    The family is asked for twice: of the base, and of the merged checkpoint.
    """
    from moe_finetune import models
    from moe_finetune.checkpoint import open as opened
    from moe_finetune.data import tokenize
    from moe_finetune.models import config_and_tokenizer

    base, calls, asked = tiny_checkpoint("qwen3_moe"), [], []
    find_family = models.find_family
    monkeypatch.setattr(
        models, "find_family", lambda *names: asked.append(names) or find_family(*names)
    )

    def counted(module, name):
        real = getattr(module, name)

        def call(path, *options, **named):
            if path == base:
                calls.append(name)
            return real(path, *options, **named)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        *(
            (opened, "read_config"),
            (opened, "read_headers"),
            (tokenize, "load_tokenizer"),
        ),
        *(
            (config_and_tokenizer, "load_tokenizer"),
            (config_and_tokenizer, "parse_config"),
            (config_and_tokenizer, "read_config"),
        ),
    ):
        counted(module, name)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"word {n} " * 4} for n in range(4)])
    recipe = recipe_of(base, tmp_path / "rows.jsonl", trainer={"save_strategy": "no"})
    run_recipe(recipe, tmp_path / "run")
    assert sorted(calls) == ["load_tokenizer", "parse_config", "read_config", "read_headers"]
    assert asked == 2 * [("qwen3_moe", None)]


def test_a_merge_whose_note_was_lost_is_done_again(tiny_checkpoint, tmp_path):
    """A kill between ``merged/`` and its note in ``summary.json``."""
    base, run = tiny_checkpoint("olmoe"), RunFolder(tmp_path)
    recipe = recipe_of(base, "d.jsonl")
    random_adapter(base, run.adapter)
    run.merged.mkdir()
    left = run.merged / "left"
    left.touch()
    merge(recipe, run, base)
    assert run.merge_done and not left.exists() and (run.merged / "config.json").is_file()
    left.touch()
    merge(recipe, run, base)
    assert left.exists(), "merged once, not twice"


def test_a_trained_model_is_reported_when_its_base_is_gone(tiny_checkpoint, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("olmoe"), base)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"word {n} " * 4} for n in range(4)])
    seldom = {"save_strategy": "no"}
    recipe = recipe_of(base, tmp_path / "rows.jsonl", lora=None, trainer=seldom)
    run = RunFolder(run_recipe(recipe, tmp_path / "run"))
    run.page.unlink()
    shutil.rmtree(base)
    run_recipe(recipe, run.path, resume=True)
    assert run.page.is_file()


def test_the_model_that_trained_is_freed_before_the_merge(tiny_checkpoint, tmp_path, monkeypatch):
    """A merge and its verification must not add to the memory of training."""
    import moe_finetune.run as run_module
    from moe_finetune.training.run import train as train_module

    trained, alive = [], []
    build, merge_stage = train_module.trainable_model, run_module.merge

    def built(*args):
        model = build(*args)
        trained.append(weakref.ref(model))
        return model

    def merged(*args):
        alive.append(trained[0]() is not None)
        return merge_stage(*args)

    monkeypatch.setattr(train_module, "trainable_model", built)
    monkeypatch.setattr(run_module, "merge", merged)
    write_jsonl(tmp_path / "train.jsonl", [{"text": "ab cde fgh " * 5}] * 4)
    method, frozen = {"preset": "orthogonal_variance"}, {"train": "frozen"}
    base, data = tiny_checkpoint("qwen3_moe"), tmp_path / "train.jsonl"
    run_recipe(recipe_of(base, data, method=method, router=frozen), tmp_path / "run")
    assert alive == [False]


def test_the_trained_model_is_gone_when_the_merge_is_verified(
    tiny_checkpoint, tmp_path, monkeypatch
):
    """Verify loads models of its own; with the trained one the run took twice a step's memory."""
    from moe_finetune import run as module
    from moe_finetune.training.run import train

    write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab " * 9}] * 4)
    method = {"preset": "loss_free", "export_bias": "drop"}
    recipe = recipe_of(tiny_checkpoint("qwen3_moe"), tmp_path / "rows.jsonl", method=method)
    trained, seen, make = [], [], train.trainable_model

    def kept(*args):
        model = make(*args)
        trained.append(weakref.ref(model.get_base_model()))
        return model

    monkeypatch.setattr(train, "trainable_model", kept)
    monkeypatch.setattr(module, "verify", lambda *_: seen.append(trained[0]()))
    run_recipe(recipe, tmp_path / "run")
    assert seen == [None]
