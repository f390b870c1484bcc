"""A start that fails ends with exit code 2 and one message, and leaves nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import TrainerCallback

from moe_finetune import cli
from moe_finetune.data.load_rows import load_examples
from moe_finetune.errors import RecipeError
from moe_finetune.models.config_and_tokenizer import parse_config
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.run import plan_run
from moe_finetune.training.before.prepare import prepare
from moe_finetune.training.run import trainer as stage_trainer
from moe_finetune.training.run.checkpoint_and_rows import open_start
from moe_finetune.training.run.train import KeepSteps

PLATEAU = "trainer.lr_scheduler_kwargs={patience: 0, threshold: 10.0, min_lr: 1.0e-9}"


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint) -> Path:
    rows = [{"prompt": f"number {n}", "completion": f" comes before {n + 1}"} for n in range(7)]
    data = tmp_path / "in" / "data.jsonl"
    data.parent.mkdir()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "in" / "recipe.yaml"
    content = {
        "model": {"path": str(tiny_checkpoint("qwen3_moe")), "dtype": "float32"},
        "method": "orthogonal_variance",
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(data), "max_length": 40},
        "trainer": {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none"},
        "export": {"merge": False},
    }
    file.write_text(json.dumps(content))
    return file


def train(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["train", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_a_corrected_start_works_and_logs_its_few_steps(capsys, caplog, recipe, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert train(capsys, recipe, "trainer.report_to=nolog", "--output", run)[0] == 2
    assert not list(run.iterdir()), "an empty folder stays what it was"
    held_out = f"data.validation={recipe.parent / 'data.jsonl'}"
    steps = ["trainer.logging_steps=50", "trainer.eval_steps=30"]
    # A warning is of a value that was given, not of the default that every short run exceeds.
    assert train(capsys, recipe, held_out, "--output", run, "--dry-run")[0] == 0
    assert "is more than the run's" not in caplog.text
    code, _, err = train(capsys, recipe, *steps, held_out, "--output", run)
    assert code == 0, err
    said = (
        "trainer.logging_steps 50 is more than the run's 3 steps; the run logs every step instead"
    )
    assert said in caplog.text
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "evaluated only before the first step and after the last" in caplog.text
    assert [row["step"] for row in logged if "eval_loss" in row] == [0, 3]
    assert [row["step"] for row in logged if row["kind"] == "train"] == [1, 2, 3]


def test_a_start_that_fails_late_removes_only_its_own(capsys, recipe, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RecipeError("the disk has turned to sand")

    monkeypatch.setattr(stage_trainer.trainer_of(STAGES["sft"]), "train", fail)
    run = tmp_path / "run"
    assert train(capsys, recipe, "--output", run)[0] == 2
    assert not run.exists()

    def fail_with_a_log(trainer, *_, **__):
        (run / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": 2.0}\n')
        fail()

    monkeypatch.setattr(stage_trainer.trainer_of(STAGES["sft"]), "train", fail_with_a_log)
    assert train(capsys, recipe, "--output", run)[0] == 2
    assert {"metrics.jsonl", "recipe.yaml", "routing"} <= {p.name for p in run.iterdir()}
    before = sorted(run.rglob("*"))
    monkeypatch.setattr(stage_trainer.trainer_of(STAGES["sft"]), "train", fail)
    assert train(capsys, recipe, "--output", run, "--resume")[0] == 2
    assert sorted(run.rglob("*")) == before


def test_a_dry_run_shows_the_plan_and_writes_nothing(capsys, recipe, tmp_path):
    overrides = ["trainer.max_steps=-1", "trainer.num_train_epochs=2", "method=erc"]
    code, out, err = train(capsys, recipe, *overrides, "--output", tmp_path / "run", "--dry-run")
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert "method         erc (load_balance, erc)" in out
    assert "7 rows" in out and "validation     none" in out
    assert "steps          8, of 2 sequences" in out  # 4 an epoch
    code, _, err = train(
        capsys, recipe, "trainer.optim_args=nope", "--output", tmp_path / "run", "--dry-run"
    )
    assert code == 2 and "trainer.optim_args" in err


def _machine_of(monkeypatch, size):
    for module in ("memory.plan", "before.prepare", "run.checkpoint_and_rows"):
        monkeypatch.setattr(f"moe_finetune.training.{module}.machine_bytes", lambda: size)


def test_memory_is_refused_with_the_plan_unless_told_otherwise(
    recipe, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO", "moe_finetune")
    plan = plan_run(load_recipe(recipe), tmp_path / "run")
    assert plan.fixed == plan.memory.stored.fixed < plan.memory.total
    _machine_of(monkeypatch, plan.fixed - 1)
    with pytest.raises(RecipeError, match=r"(?s)weights, adapter .* GiB.*lower lora.rank"):
        prepare(load_recipe(recipe))
    prepare(load_recipe(recipe), ignore_memory=True)
    # Only the fixed bytes were compared: a run of 30 GiB began on a machine of 24 without a word.
    _machine_of(monkeypatch, plan.fixed)
    with pytest.raises(RecipeError, match=r"(?s)at its worst moment.*does not fit: needs .*change"):
        prepare(load_recipe(recipe))
    prepare(load_recipe(recipe), ignore_memory=True)
    # The formula may be 15 % too high, so that much over is a warning.
    _machine_of(monkeypatch, int(0.86 * plan.memory.total))
    prepare(load_recipe(recipe))
    assert "may not fit: needs" in caplog.text
    caplog.clear()
    _machine_of(monkeypatch, plan.memory.total + 1)
    prepare(load_recipe(recipe))
    assert "may not fit" not in caplog.text
    assert f"peak memory: {plan.memory.total / 2**30:.2f} GiB, without libraries" in caplog.text


def test_the_plan_counts_the_longest_row(recipe, tmp_path):
    """2,048 tokens a row were planned for rows of at most 1,245."""
    short = plan_run(load_recipe(recipe), tmp_path / "run").memory
    long = plan_run(load_recipe(recipe, ["data.max_length=4096"]), tmp_path / "run").memory
    assert short.total == long.total
    assert "memory on this CPU, micro-batch of" in "\n".join(short.lines())
    # All rows fill less than one packed row; the shortest packed row that there can be is full.
    packed = ["data.packing=true", "trainer.per_device_train_batch_size=1"]
    inputs = plan_run(load_recipe(recipe, ["data.max_length=4096", *packed]), tmp_path / "run")
    assert inputs.memory.batch[:2] == (1, inputs.tokens) and inputs.tokens > 64
    inputs = plan_run(load_recipe(recipe, ["data.max_length=64", *packed]), tmp_path / "run")
    assert inputs.memory.batch[:2] == (1, 64)


def test_what_is_prepared_is_not_changed_by_its_checks(recipe, tmp_path):
    """The run's own start must find the data as it was."""
    inputs = prepare(load_recipe(recipe, ["data.packing=true"]))
    assert inputs.train.column_names == ["input_ids", "labels"] and len(inputs.train) == 7
    assert inputs.tokens == sum(map(len, inputs.train["input_ids"]))


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_end|>"])
def test_rows_end_with_the_end_token_of_the_trainer(recipe, end):
    """TRL gives the tokenizer that token, but these rows it takes as they are."""
    loaded = load_recipe(recipe, [f"trainer.eos_token={end}", "data.max_length=64"])
    start = open_start(loaded)
    rows = load_examples(loaded.data, start.tokenizer, 0).train
    ends = {row["input_ids"][-1] for row in rows}
    assert ends == {start.tokenizer.convert_tokens_to_ids(end)}
    assert start.tokenizer.eos_token == end


def test_the_opened_checkpoint_keeps_its_config(recipe):
    """A merge and its verification load what the checkpoint says, not what the run trains with."""
    start = prepare(load_recipe(recipe, ["model.attn_implementation=eager"])).start
    config, stored = start.checkpoint.model_config, parse_config(start.folder)
    assert config._attn_implementation == stored._attn_implementation
    assert config.to_dict() == stored.to_dict()


def test_experts_that_are_to_be_spread_over_one_process_are_warned_of(recipe, caplog):
    prepare(load_recipe(recipe))
    assert "all, but only one process was started, so experts" not in caplog.text
    prepare(load_recipe(recipe, ["parallel.experts=all"]))
    assert (
        "parallel.experts: all, but only one process was started, so experts are not spread"
        in caplog.text
    )


def test_a_tokenizer_s_pattern_without_an_end_is_reported(capsys, recipe, tmp_path):
    broken = tmp_path / "in" / "broken"
    shutil.copytree(json.loads(recipe.read_text())["model"]["path"], broken)
    tokenizer = json.loads((broken / "tokenizer.json").read_text())
    pattern = {"Regex": r"((a|aa|[a-z ]+)+)+$x|(n+)+\1{5}(.*)*(.*)*z"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    (broken / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": split}))
    code, _, err = train(capsys, recipe, f"model.path={broken}", "--output", tmp_path / "run")
    assert code == 2 and f"{broken}: its tokenizer failed on the training data" in err
    assert not (tmp_path / "run").exists()


def test_a_resume_takes_other_keys_where_they_leave_the_training_what_it_was(
    capsys, caplog, recipe, tmp_path, monkeypatch
):
    def stop_in_step_3(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt

    common = ["method={terms: {variance: {share: 0.1}}}", "trainer.max_steps=6", "lora.dropout=0.1"]
    often = [*common, "trainer.save_steps=1", "trainer.logging_steps=1"]
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert train(capsys, recipe, *often, "--output", straight)[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(KeepSteps, "on_step_end", stop_in_step_3)
        assert train(capsys, recipe, *often, "--output", run)[0] == 130
    code, _, err = train(capsys, recipe, *often, "lora.rank=5", "--output", run, "--resume")
    assert code == 2 and "lora.rank: 4, now 5" in err and "max_steps" not in err
    seldom = [*common, "trainer.save_steps=3", "trainer.logging_steps=3"]
    assert train(capsys, recipe, *seldom, "--output", run, "--resume")[0] == 0
    assert "changed since the start of the run: trainer.logging" in caplog.text
    name = Path("adapter") / "adapter_model.safetensors"
    assert (run / name).read_bytes() == (straight / name).read_bytes()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 6]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "checkpoint-3",
        "checkpoint-6",
    }
    saved = load_recipe(run / "recipe.yaml")
    assert saved.trainer["save_steps"] == 3
    # What comes after training can still be asked for.
    trained = (run / name).stat().st_mtime_ns
    merged = [*seldom, "export.merge=true"]
    assert train(capsys, recipe, *merged, "--output", run, "--resume")[0] == 0
    assert (run / "merged" / "config.json").exists()
    assert (run / name).stat().st_mtime_ns == trained


@pytest.mark.parametrize(
    "options",
    [
        ["trainer.lr_scheduler_type=reduce_lr_on_plateau", PLATEAU],
        ["trainer.lr_scheduler_type=greedy", PLATEAU],
        ["trainer.restore_callback_states_from_checkpoint=true", "method=loss_free"],
        ["trainer.neftune_noise_alpha=5", "trainer.label_smoothing_factor=0.1"],
        ["trainer.train_sampling_strategy=group_by_length"],
        ["trainer.train_sampling_strategy=batch_rebalance"],
    ],
)
def test_values_that_follow_what_happens_in_a_run_resume_to_the_byte(
    capsys, recipe, tmp_path, monkeypatch, options
):
    def stop_in_step_3(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt

    shutil.copy(recipe.parent / "data.jsonl", tmp_path / "held-out.jsonl")
    follows = PLATEAU in options
    options = [
        *options,
        f"data.validation={tmp_path / 'held-out.jsonl'}",
        *("trainer.max_steps=5", "trainer.eval_steps=1", "trainer.save_steps=2"),
    ]
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert train(capsys, recipe, *options, "--output", straight)[0] == 0
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    rates = [row["learning_rate"] for row in rows if row["kind"] == "train"]
    assert not follows or rates[-1] < rates[0]
    with monkeypatch.context() as patched:
        patched.setattr(KeepSteps, "on_step_end", stop_in_step_3)
        assert train(capsys, recipe, *options, "--output", run)[0] == 130
    assert train(capsys, recipe, *options, "--output", run, "--resume")[0] == 0
    name = Path("adapter") / "adapter_model.safetensors"
    assert (run / name).read_bytes() == (straight / name).read_bytes()


def test_a_loader_without_a_batch_is_refused_and_the_plan_counts_whole_batches(
    capsys, recipe, tmp_path
):
    """Seven rows: with ``dataloader_drop_last`` three batches of two, and none of eight."""
    overrides = ["trainer.max_steps=-1", "trainer.dataloader_drop_last=true"]
    whole = [*overrides, "trainer.num_train_epochs=2"]
    _, out, _ = train(capsys, recipe, *whole, "--dry-run", "--output", tmp_path / "run")
    assert "steps          6, of 2 sequences" in out
    part = [*overrides, "trainer.num_train_epochs=1.5"]
    _, out, _ = train(capsys, recipe, *part, "--dry-run", "--output", tmp_path / "run")
    assert "steps          5, of 2 sequences" in out  # half of an epoch of three begins a step more
    run = tmp_path / "run"
    big = "trainer.per_device_train_batch_size=8"
    code, _, err = train(capsys, recipe, *overrides, big, "--output", run)
    assert code == 2 and "trainer.dataloader_drop_last: 7 training rows" in err
    assert not run.exists()


def test_a_run_that_ends_before_its_steps_fails_unless_a_callback_ended_it(
    capsys, caplog, recipe, tmp_path, monkeypatch
):
    """The trainer of transformers ends quietly when a loader runs dry, whatever its length says."""
    made = stage_trainer.trainer_of(STAGES["sft"])

    class Dry(made):
        def get_batch_samples(self, iterator, count, device):
            empty = self.state.global_step >= 1
            return ([], None) if empty else super().get_batch_samples(iterator, count, device)

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    class Stopped(made):
        def train(self, *args, **kwargs):
            self.add_callback(Enough())
            return super().train(*args, **kwargs)

    for number, (kind, ends) in enumerate({Dry: 2, Stopped: 0}.items()):
        monkeypatch.setattr(stage_trainer, "trainer_of", lambda stage, kind=kind: kind)
        run = tmp_path / f"run{number}"
        code, _, err = train(capsys, recipe, "--output", run)
        assert code == ends, err
        assert ("training ended after step 1 of 3" in err) == (kind is Dry)
        assert ("a callback stopped training at step 2 of 3" in caplog.text) == (kind is Stopped)
        assert (run / "adapter").exists() == (kind is Stopped)


def test_a_checkpoint_without_an_optimizer_is_announced_and_refused(
    capsys, caplog, recipe, tmp_path
):
    run = tmp_path / "run"
    only = ["trainer.save_only_model=true", "trainer.save_steps=2", "--output", run]
    assert train(capsys, recipe, *only)[0] == 0
    assert "trainer.save_only_model: checkpoints have no optimizer" in caplog.text
    shutil.rmtree(run / "adapter")
    code, _, err = train(capsys, recipe, *only, "--resume")
    assert code == 2 and "checkpoint-3: was saved with trainer.save_only_model" in err
    start = f"lora.start={run / 'checkpoints' / 'checkpoint-3'}"
    code, _, err = train(capsys, recipe, start, "--output", tmp_path / "next")
    assert code == 0, err


def test_an_adapter_of_a_higher_rank_is_refused_by_the_dry_run(capsys, recipe, tmp_path):
    assert train(capsys, recipe, "lora.rank=5", "--output", tmp_path / "run")[0] == 0
    start = f"lora.start={tmp_path / 'run' / 'adapter'}"
    code, _, err = train(capsys, recipe, start, "--dry-run", "--output", tmp_path / "next")
    assert code == 2 and "has rank 5, but the recipe gives it 4" in err


def test_validation_on_the_training_rows_is_said(capsys, recipe, tmp_path):
    shutil.copy(recipe.parent / "data.jsonl", tmp_path / "copy.jsonl")
    held_out = f"data.validation={tmp_path / 'copy.jsonl'}"
    code, _, err = train(capsys, recipe, held_out, "--output", tmp_path / "run")
    assert code == 0 and "data.validation has the rows of data.train" in err


def test_a_short_run_logs_every_step_unless_the_recipe_says_how_often(capsys, recipe, tmp_path):
    def steps(run):
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [row["step"] for row in rows if row["kind"] == "train"]

    few = ["trainer.max_steps=12"]
    assert train(capsys, recipe, *few, "--output", tmp_path / "a")[0] == 0
    assert steps(tmp_path / "a") == list(range(1, 13))
    every = [*few, "trainer.logging_steps=5"]
    assert train(capsys, recipe, *every, "--output", tmp_path / "b")[0] == 0
    assert steps(tmp_path / "b") == [5, 10, 12]


def test_data_in_a_recipes_place_is_named(capsys, recipe, tmp_path):
    data = recipe.parent / "data.jsonl"
    code, _, err = train(capsys, data, "--output", tmp_path / "run")
    assert code == 2 and f"{data} is data, not a recipe" in err


def test_one_run_has_its_report_in_its_folder(capsys, recipe, tmp_path, monkeypatch):
    run = tmp_path / "run"
    code, _, err = train(capsys, recipe, "export={merge: true}", "--output", run)
    assert code == 0, err
    (run / "report" / "index.html").unlink()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report" / "index.html").read_text()
    assert "verified: " in page and not (tmp_path / "report").exists()
    assert cli.main(["report", str(run), str(run)]) == 0
    assert (tmp_path / "report" / "index.html").is_file()
