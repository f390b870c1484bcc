"""A recipe to start from: it loads, it fits the checkpoint, and nothing bad is written."""

import json
import shlex

import pytest
import yaml

from moe_finetune import cli
from moe_finetune.cli.app import split_items
from moe_finetune.models.config_and_tokenizer import open_config
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.training.memory.plan import GIB, plan_recipe


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "in" / "my.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"question": "Why?", "answer": "So."}) + "\n")
    return path


def test_a_starter_is_a_recipe_for_the_checkpoint(tiny_checkpoint, rows, tmp_path, capsys):
    base, output = tiny_checkpoint("deepseek_v2"), tmp_path / "my.yaml"
    arguments = ["init", str(base), "--data", str(rows), "--method", "erc", "--suite", "gsm8k"]
    assert cli.main([*arguments, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("deepseek_v2, the architecture of DeepSeek-V2-Lite: 2 MoE layers")
    assert "12 routed experts, 3 per token" in said
    assert f"moe-finetune preview {output}" in said
    recipe = load_recipe([output])
    assert (recipe.model.path, recipe.model.dtype) == (str(base), "float32")
    assert recipe.method.terms["erc"].share == 0.3 and recipe.data.train == str(rows)
    assert recipe.evaluation is not None and recipe.evaluation.suite == "gsm8k"
    text = output.read_text()
    assert "wrapped as 'Question: {question}" in text and "ERC table down to 0" in text
    assert cli.main([*arguments, "--output", str(output)]) == 2
    assert "exists; choose another --output" in capsys.readouterr().err
    assert output.read_text() == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint": "./nowhere"}, "nowhere"),
        ({"--data": "gone.jsonl"}, "no data file or folder gone.jsonl"),
        ({"--data": "empty.jsonl"}, "empty.jsonl is empty"),
        ({"--data": "odd.jsonl"}, "the row has ask"),
        ({"--method": "ercc"}, "--method ercc: unknown; did you mean 'erc'"),
        ({"--suite": "gsm9k"}, "unknown suite 'gsm9k'; did you mean 'gsm8k'"),
        ({"--data": None}, "--data: required, because there is no terminal to ask on"),
    ],
)
def test_wrong_answers_write_nothing(
    tiny_checkpoint, rows, tmp_path, monkeypatch, capsys, changes, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "odd.jsonl").write_text('{"ask": "Why?"}\n')
    given = {"checkpoint": str(tiny_checkpoint("olmoe")), "--data": str(rows)} | changes
    base = given.pop("checkpoint")
    options = [word for pair in given.items() if pair[1] is not None for word in pair]
    assert cli.main(["init", base, *options, "--output", "r.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "r.yaml").exists()


def test_on_a_terminal_it_asks(tiny_checkpoint, rows, tmp_path, monkeypatch, capsys):
    answers = {"Checkpoint": str(tiny_checkpoint("olmoe")), "Rows to learn": str(rows),
               "Rows to measure": "", "Method": "dpp"}  # fmt: skip
    asked = []

    def prompt(text, **_):
        asked.append(text)
        return next(answer for start, answer in answers.items() if text.startswith(start))

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", prompt)
    assert cli.main(["init", "--output", str(tmp_path / "r.yaml")]) == 0
    assert len(asked) == 4 and "shows" not in asked
    made = yaml.safe_load((tmp_path / "r.yaml").read_text())
    assert made["method"] == {"preset": "dpp", "share": 0.1} and "validation" not in made["data"]
    assert "output cosine below aux_loss" in capsys.readouterr().out


def following(output: str) -> dict[str, list[str]]:
    """The words of each command under "next:", by what it is for."""
    lines = output.partition("next:\n")[2].splitlines()
    return {line[2:26].strip(): shlex.split(line[26:]) for line in lines}


def test_the_first_run_has_no_added_loss_and_the_second_is_compared(
    tiny_checkpoint, rows, tmp_path, capsys
):
    """It chose a method of which the pages say that no score rose, with full routers."""
    rows.write_text(rows.read_text() + json.dumps({"question": "When?", "answer": "Now."}) + "\n")
    output = tmp_path / "r.yaml"
    command = ["init", str(tiny_checkpoint("olmoe")), "--data", str(rows), "--output"]
    assert cli.main([*command, str(output)]) == 0
    recipe = load_recipe(output)
    assert (recipe.method.preset, recipe.router.train) == ("none", "frozen")
    assert recipe.data.validation == 0.1
    lines = following(capsys.readouterr().out)
    first, second = lines["train"], lines["with the other method"]
    changed = load_recipe(*split_items(second[2:-2]))
    assert changed.method.preset == "orthogonal_variance" and changed.router.train == "full"
    assert changed.method.terms["orthogonality"].share == 0.02
    assert lines["compare both"][1:4] == ["report", first[-1], second[-1]]
    # A recipe with losses is compared with one without, which comes first.
    assert cli.main([*command, str(tmp_path / "m.yaml"), "--method", "erc"]) == 0
    lines = following(capsys.readouterr().out)
    first, second = lines["train"], lines["with the other method"]
    assert load_recipe(*split_items(second[2:-2])).method.terms == {}
    assert lines["compare both"][1:4] == ["report", second[-1], first[-1]]


def test_overrides_are_those_of_train(tiny_checkpoint, rows, tmp_path, capsys):
    """Its advice, data.columns=..., was an unexpected argument to it."""
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows.write_text(json.dumps({"dialogue": turns}) + "\n")
    command = ["init", str(tiny_checkpoint("olmoe")), "--output", str(tmp_path / "r.yaml")]
    assert cli.main([*command, "--data", str(rows)]) == 2
    advice = capsys.readouterr().err.strip().rpartition("data.columns: ")[2]
    assert advice == "data.columns={messages: dialogue}"
    given = [advice, f"data.train={rows}", "method=erc", "lora.rank=8", "trainer.max_steps=7"]
    given += ["data.max_length=3000", "data.validation=null"]
    assert cli.main([*command, *given, "--gpu", "0.001"]) == 0
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.data.columns == {"messages": "dialogue"} and recipe.data.validation is None
    assert recipe.method.terms["erc"].share == 0.3 and recipe.router.train == "full"
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (8, 32)
    # What makes a step fit leaves the given length alone, and takes its other means.
    assert recipe.data.max_length == 3000 and recipe.model.quantization == "nf4"
    text = (tmp_path / "r.yaml").read_text()
    assert text.count("# as given to init") == 7 and "messages: dialogue" in text


def test_measured_experts_are_planned_and_not_offloaded(tiny_checkpoint, rows, tmp_path):
    """A run cannot measure experts that wait in the host's memory, so that is no way to fit."""
    base, plans = str(tiny_checkpoint("olmoe")), []
    for number, given in enumerate((["lora.dropout=0.1"], ["lora.experts.top=0.25"])):
        output = tmp_path / f"{number}.yaml"
        command = ["init", base, "--data", str(rows), *given, "--gpu", "0.001"]
        assert cli.main([*command, "--output", str(output)]) == 0
        recipe = load_recipe(output)
        assert (recipe.model.offload == "experts") == (number == 0)
        plans.append(plan_recipe(open_config(base)[0], recipe, "cuda"))
    assert recipe.lora.experts.top == 0.25 and recipe.lora.rank == 16
    assert plans[1].stored.adapter < plans[0].stored.adapter


def test_training_the_whole_model_leaves_out_what_needs_an_adapter(tiny_checkpoint, rows, tmp_path):
    output = tmp_path / "r.yaml"
    command = ["init", str(tiny_checkpoint("olmoe")), "--data", str(rows), "lora=null"]
    assert cli.main([*command, "--gpu", "0.0001", "--output", str(output)]) == 0
    recipe = load_recipe(output)
    assert recipe.lora is None and recipe.model.quantization == "none"
    assert recipe.trainer["per_device_train_batch_size"] == 1


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("lora.rnk=8", "override 'lora.rnk=8': lora.rnk"),
        ("method=ercc", "ercc"),
        ("stage=kto", "--stage kto"),
        ("trainer.max_steps=many", "trainer.max_steps"),
        ("other.yaml", "expected one checkpoint"),
    ],
)
def test_wrong_overrides_write_nothing(tiny_checkpoint, rows, tmp_path, capsys, override, place):
    output = tmp_path / "r.yaml"
    command = ["init", str(tiny_checkpoint("olmoe")), override, "--data", str(rows)]
    assert cli.main([*command, "--output", str(output)]) == 2
    assert place in capsys.readouterr().err and not output.exists()


def test_files_of_validation_rows_win_over_a_share(tiny_checkpoint, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    output = tmp_path / "r.yaml"
    command = ["init", str(tiny_checkpoint("olmoe")), "--data", str(folder)]
    assert cli.main([*command, "--output", str(output)]) == 0
    assert "validation:" not in output.read_text()
    assert load_recipe(output).data.validation is not None


def test_preferences_get_a_recipe_of_stage_dpo(tiny_checkpoint, rows, tmp_path, capsys):
    """There was no way from the README to DPO: both messages led to training on `chosen`."""
    base, output = str(tiny_checkpoint("olmoe")), tmp_path / "r.yaml"
    rows.write_text(json.dumps({"prompt": "2+2", "chosen": "4", "rejected": "5"}) + "\n")
    command = ["init", base, "--data", str(rows), "--output", str(output)]
    assert cli.main(command) == 2
    assert "set stage: dpo (init writes such a recipe with --stage dpo)" in capsys.readouterr().err
    assert cli.main([*command, "--stage", "dpo"]) == 0
    recipe = load_recipe(output)
    # No loss that its own run calls too little to show, and routers that unmerged serving takes.
    assert (recipe.stage, recipe.method.preset, recipe.router.train) == ("dpo", "none", "frozen")
    assert recipe.trainer["beta"] == 0.1 and "prompt, chosen, rejected" in output.read_text()
    assert "1 step of 1 row, which changes little" in output.read_text()
    second = following(capsys.readouterr().out)["with the other method"]
    changed = load_recipe(*split_items(second[2:-2]))
    assert changed.stage == "dpo" and changed.method.terms["orthogonality"].share == 0.1
    assert cli.main([*command[:-1], "x.yaml", "--stage", "kto"]) == 2
    assert "--stage kto: init writes recipes for sft, dpo, grpo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "reward", "tokens"),
    [
        ({"prompt": "2+2=", "answer": 4}, "exact_match", 64),
        ({"prompt": "2+2=", "answer": "four " * 40}, "exact_match", 512),
        ({"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4}, "exact_match", 512),
        ({"prompt": "Write f.", "tests": "assert f() == 4"}, "code", 512),
    ],
)
def test_prompts_get_a_recipe_of_stage_grpo(
    tiny_checkpoint, rows, tmp_path, fields, reward, tokens
):
    """The docs sent real checkpoints into the demo's recipe: answers of 6 tokens at 1e-3.

    Then `init` let a model write 512 tokens of which the answers of all rows had two.
    """
    base, output = str(tiny_checkpoint("olmoe")), tmp_path / "r.yaml"
    rows.write_text("".join(json.dumps({"number": n, **fields}) + "\n" for n in range(900)))
    command = ["init", base, "--data", str(rows), "--stage", "grpo", "--output", str(output)]
    assert cli.main(command) == 0
    recipe = load_recipe(output)
    assert [section.name for section in recipe.rewards] == [reward]
    assert recipe.trainer["max_completion_length"] == tokens and recipe.router.train == "frozen"
    assert recipe.data.validation == 0.1 and recipe.trainer["num_generations_eval"] == 1
    rows_a_step = (
        recipe.trainer["per_device_train_batch_size"]
        * recipe.trainer["gradient_accumulation_steps"]
    )
    assert rows_a_step == 64 and "which change little" not in output.read_text()
    small = tmp_path / "small.yaml"
    assert cli.main([*command[:-1], str(small), "--gpu", "0.0001"]) == 0
    recipe = load_recipe(small)
    assert recipe.trainer["gradient_accumulation_steps"] == 64
    assert recipe.data.max_length > recipe.trainer["max_completion_length"] == min(tokens, 256)


def test_on_a_terminal_a_typo_is_asked_again(tiny_checkpoint, rows, tmp_path, monkeypatch, capsys):
    """One ended it, and all answers were lost."""
    answers = {"Checkpoint": ["./nowhere", str(tiny_checkpoint("olmoe"))],
               "Rows to learn": ["gone.jsonl", str(rows)], "Rows to measure": [""],
               "Method": ["orthogonal", "dpp"]}  # fmt: skip

    def prompt(text, **_):
        return next(left.pop(0) for start, left in answers.items() if text.startswith(start))

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", prompt)
    assert cli.main(["init", "--output", str(tmp_path / "r.yaml")]) == 0
    assert "--method orthogonal: unknown; did you mean" in capsys.readouterr().out
    assert load_recipe(tmp_path / "r.yaml").method.preset == "dpp"


def test_what_it_writes_fits_this_machine(tiny_checkpoint, rows, tmp_path, monkeypatch):
    """It wrote 30 GiB on a machine of 24, which `train` then began."""
    base, first, second = str(tiny_checkpoint("olmoe")), tmp_path / "a.yaml", tmp_path / "b.yaml"
    command = ["init", base, "--data", str(rows), "--output"]
    assert cli.main([*command, str(first)]) == 0
    plan = plan_recipe(open_config(base)[0], load_recipe(first), "cpu")
    for module in ("before.starter_recipe", "memory.plan"):
        name = f"moe_finetune.training.{module}.machine_bytes"
        monkeypatch.setattr(name, lambda: plan.total * 3 // 4)
    assert cli.main([*command, str(second)]) == 0
    recipe = load_recipe(second)
    assert plan_recipe(open_config(base)[0], recipe, "cpu").total < plan.total * 3 // 4
    steps = (
        recipe.trainer["per_device_train_batch_size"],
        recipe.trainer["gradient_accumulation_steps"],
    )
    assert steps[0] * steps[1] == 32 and " GiB: " in second.read_text()


@pytest.mark.parametrize("method", ["orthogonal_variance", "aux_loss", "none"])
def test_every_line_has_a_reason(tiny_checkpoint, rows, tmp_path, method):
    output = tmp_path / "my.yaml"
    command = [
        "init",
        str(tiny_checkpoint("olmoe")),
        "--data",
        str(rows),
        "--validation",
        str(rows),
    ]
    assert (
        cli.main([*command, "--method", method, "--suite", "gsm8k", "--output", str(output)]) == 0
    )
    lines = output.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not line.rstrip().endswith(":") and not line.lstrip().startswith("#"):
            assert "  # " in line or above.lstrip().startswith("# "), line
        assert len(line) <= 100 or str(tmp_path) in line


def test_one_number_sets_everything_for_a_gpu(tiny_checkpoint, rows, tmp_path, capsys):
    """From large to small: nothing changed, a smaller step, everything, and what fits nothing."""
    base = str(tiny_checkpoint("olmoe"))
    config = open_config(base)[0]
    needed = []
    for number, share in enumerate((1.1, 0.7, 0.3, 0.001)):
        output = tmp_path / f"{number}.yaml"
        gib = share * needed[0] if needed else 1000
        command = [
            "init",
            base,
            "--data",
            str(rows),
            "--output",
            str(output),
            "--gpu",
            f"{gib:.9f}",
        ]
        assert cli.main(command) == 0
        recipe = load_recipe(output)
        plan = plan_recipe(config, recipe, "cuda")
        warned = "does not fit" in capsys.readouterr().err
        assert warned != plan.fits(gib) and warned == (number == 3)
        needed.append(plan.total / GIB)
    assert needed == sorted(needed, reverse=True) and len(set(needed)) > 2
    text = (tmp_path / "3.yaml").read_text()
    assert "quantization: nf4" in text and "rank: auto" in text and "offload: experts" in text
    # Its comment said that longer rows are left out, while they were truncated in mid-answer.
    assert recipe.data.max_length == 512 and recipe.data.overlong == "drop"
    assert "longer rows are left out" in text
    for wrong in ("0", "-3", "nan"):
        assert cli.main([*command[:-1], wrong]) == 2


def test_a_starter_says_how_many_rows_are_held_out_and_how_many_steps_are_left(
    tiny_checkpoint, rows, tmp_path
):
    """Six of 60 rows measure little, and the number of steps ignored the given batch."""
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(60)))
    base, texts = str(tiny_checkpoint("olmoe")), []
    given = (
        [],
        ["data.validation=0.5", "trainer.per_device_train_batch_size=2"],
        ["trainer.max_steps=7"],
    )
    for number, overrides in enumerate(given):
        output = tmp_path / f"{number}.yaml"
        command = ["init", base, "--data", str(rows), *overrides, "--output", str(output)]
        assert cli.main(command) == 0
        texts.append(" ".join(output.read_text().replace("#", "").split()))
    assert "; about 6 of 60, so figures on them are rough" in texts[0]
    assert "2 steps of 54 rows, which change little" in texts[0] and "32 rows a step" in texts[0]
    assert "2 steps of 30 rows" in texts[1] and "16 rows a step" in texts[1]
    assert "not used: trainer.max_steps ends the run" in texts[2]
    assert "change little" not in texts[2]
