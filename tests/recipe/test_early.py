"""Wrong keys are known before torch and TRL are imported."""

import json
import subprocess
import sys
from typing import Any

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.fields_of_trl import section_in_source
from moe_finetune.recipe.method import refuse_unknown_preset
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.stages import STAGES, trainer_section
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before.refuse_recipe import check_trainer_keys
from moe_finetune.training.run.step_count import DEFAULTS

PROGRAM = """
import contextlib, io, json, sys
from moe_finetune import cli
answers = []
for command in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(command)
    assert not {"torch", "transformers", "trl"} & sys.modules.keys(), command
    answers.append([code, said.getvalue()])
json.dump(answers, sys.stdout)
"""


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_the_source_shows_the_fields_of_the_class(stage):
    """Names, choices and limits; a type is the class's or left to the import."""
    source, real = section_in_source(stage).model_fields, trainer_section(stage).model_fields
    assert source.keys() == real.keys() and len(source) > 90
    for name, field in source.items():
        if field.annotation is not Any:
            assert field.annotation == real[name].annotation, name
            assert str(field.metadata) == str(real[name].metadata), name
    assert sum(field.annotation is Any for field in source.values()) < 12


MISSING = [
    (["train", "r.yaml", "data.train=gone.jsonl", "-o", "new"], "no data file or folder gone"),
    (["train", "r.yaml", "data.validation=[gone.jsonl]", "-o", "new"], "gone.jsonl"),
    (
        ["train", "r.yaml", "model.path=./gone", "-o", "new"],
        "override 'model.path=./gone': model.path: ./gone: no such folder (relative to /",
    ),
    (["train", "m.yaml", "-o", "new"], "no recipe file m.yaml; did you mean 'r.yaml'?"),
    (
        ["train", "r.yaml", "method=orthogonal_varience", "-o", "new"],
        "method.preset: unknown preset 'orthogonal_varience'; did you mean 'orthogonal_variance'?",
    ),
    (["train", "r.yaml", "evaluation.suite=gsm9k", "-o", "new"], "did you mean 'gsm8k'"),
    (["train", "r.yaml", "-o", "done"], "done already contains a run"),
    (["train", "r.yaml", "-o", "new", "--resume"], "--resume: new contains no run"),
    (["preview", "r.yaml", "data.train=gone.jsonl"], "no data file or folder gone.jsonl"),
    (["init", "./gone", "--data", "t.jsonl", "-o", "i.yaml"], "./gone: no such folder"),
    (["init", "m", "--data", "gone.jsonl", "-o", "i.yaml"], "no data file or folder gone.jsonl"),
    (["init", "m", "--data", "t.jsonl", "-o", "r.yaml"], "r.yaml exists; choose another"),
    (["init", "m", "--data", "t.jsonl", "--suite", "gsm9k", "-o", "i.yaml"], "'gsm8k'"),
    (["init", "m", "--data", "t.jsonl", "lora.rnk=8", "-o", "i.yaml"], "lora.rnk: unknown key"),
    (["eval", "./gone", "--suite", "gsm8k", "-o", "new"], "./gone: no such folder"),
    (["eval", "m", "--suite", "gsm9k", "-o", "new"], "did you mean 'gsm8k'"),
    (["ask", "./gone", "Why?"], "./gone: no such folder"),
    (["ask", "./doen", "Why?"], "did you mean 'done'?"),
    (["analyze", "./gone", "--domain", "a=t.jsonl", "-o", "new"], "./gone: no such folder"),
    (["analyze", "m", "--domain", "a=gone.jsonl", "-o", "new"], "gone.jsonl"),
    (["analyze", "m", "--domain", "a=t.jsonl", "-o", "done"], "done: is not empty"),
    (["convert", "m", "-o", "done"], "done: is not empty"),
    (["convert", "m", "--to", "peft", "-o", "done"], "done: is not empty"),
    (
        ["train", "r.yaml", "data.template={text: '{title}'}", "-o", "new"],
        "t.jsonl:1: data.template.text: no field 'title'",
    ),
    (
        ["report", "done", "dome"],
        "dome: no such folder; give the --output folder of a run; did you",
    ),
    (["merge", "dnoe", "-o", "new"], "dnoe: no such folder"),
    (["convert", "dnoe", "--to", "peft", "-o", "new"], "dnoe: no such folder"),
    (["compare", "done", "gone/eval"], "gone/eval: no such folder"),
    (["select", "gone", "-o", "new.json"], "gone: no trace found"),
    (["verify", "dnoe"], "dnoe: no such folder; give a run, a merged checkpoint"),
    (["merge", "m", "-o", "done"], "done: is not empty; choose another --output"),
    (["prune", "m", "--experts", "gone.json", "-o", "new"], "gone.json: no such file"),
    (["prune", "m", "--experts", "t.jsonl", "-o", "done"], "done: is not empty"),
    (["prune", "./gone", "--experts", "t.jsonl", "-o", "new"], "./gone: no such folder"),
    (["train", "r.yaml", "data.columns={text:title}", "-o", "new"], "colon: {text: title}"),
    (["inspect", "m", "lora.rank=8"], "lora.rank=8: changes a recipe's value"),
    (["inspect", "m", "s.yaml", "--recipe", "r.yaml"], "a recipe follows --recipe"),
    (
        ["train", "r.yaml", "data.columns={prompt: text, completion: txet}", "-o", "new"],
        "t.jsonl:1: no field 'txet' (data.columns.completion); did you mean 'text'?",
    ),
    (
        ["preview", "r.yaml", "data.columns={text: title}"],
        "t.jsonl:1: no field 'title' (data.columns.text)",
    ),
    (
        [
            *("init", "m", "--data", "t.jsonl", "--stage", "dpo", "-o", "new.yaml"),
            "data.columns={prompt: ask}",
        ],
        "t.jsonl:1: no field 'ask' (data.columns.prompt)",
    ),
    (
        ["init", "m", "--data", "p.jsonl", "--stage", "dpo", "-o", "new.yaml"],
        "p.jsonl:1: no field 'prompt'; a row needs prompt, chosen, rejected, and this one has id, "
        "question, good, bad. Map your fields with data.columns, for example "
        "data.columns={prompt: question, chosen: good, rejected: bad}",
    ),
    (
        [
            *("train", "r.yaml", "stage=dpo", "data.train=p.jsonl", "-o", "new"),
            "data.columns={rejected: bad}",
        ],
        "data.columns={prompt: question, chosen: good, rejected: bad}",
    ),
    (
        [
            *("train", "r.yaml", "stage=grpo", "rewards=[exact_match]", "-o", "new"),
            "data.train=p.jsonl",
        ],
        "for example data.columns={prompt: question}",
    ),
]
"""Commands that name what is not there, or write where something is."""
CASES = [
    (["--help"], None),
    (["--outptu", "x"], "No such option: --outptu"),
    (["learning_rte=3", "lora.r=2"], "learning_rte: unknown key\nlora.rank"),
    (["trainer.learning_rte=3"], "did you mean 'learning_rate'"),
    (["trainer.learning_rate=fast"], "trainer.learning_rate: must be a valid number"),
    (["trainer.beta=0.1"], "it belongs to stage dpo or grpo"),
    (["trainer.load_in_4bit=true"], "did you mean 'model.quantization: nf4'?"),
    (["trainer.max_seq_length=99"], "did you mean 'data.max_length'?"),
    (["model.path=3"], "model.path: must be a valid string, not 3"),
    (["stage=sftt"], "stage: must be 'sft', 'pretrain', 'dpo' or 'grpo', not 'sftt'"),
]


@pytest.mark.more
def test_a_wrong_key_ends_without_the_heavy_imports(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\nmethod: erc\ndata: {train: t.jsonl}\n")
    output = ["--output", str(tmp_path / "run")]
    commands = [["train", str(recipe), *arguments, *output] for arguments, _ in CASES]
    for (arguments, said), (code, shown) in zip(CASES, ends_of(commands, tmp_path), strict=True):
        assert code == (0 if said is None else 2), (arguments, shown)
        assert all(part in shown for part in (said or "").split("\n")), (arguments, shown)


@pytest.mark.more
def test_what_is_missing_ends_without_the_heavy_imports(tmp_path):
    """A missing file took 17 processor seconds, all of them imports."""
    (tmp_path / "m").mkdir()
    (tmp_path / "done").mkdir()
    recipe = "model: {path: m}\nmethod: erc\ndata: {train: t.jsonl}\n"
    for file in ("r.yaml", "done/recipe.yaml"):
        (tmp_path / file).write_text(recipe)
    (tmp_path / "t.jsonl").write_text('{"text": "a b"}\n')
    pairs = '{"id": 7, "question": "2+2", "good": "4", "bad": "5"}\n'
    (tmp_path / "p.jsonl").write_text(pairs)
    for (arguments, said), (code, shown) in zip(
        MISSING, ends_of([arguments for arguments, _ in MISSING], tmp_path), strict=True
    ):
        assert code == 2 and said in shown, (arguments, shown)
    kept = ["done", "m", "p.jsonl", "r.yaml", "t.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def ends_of(commands, folder):
    """The exit code and standard error of each command, in one process of its own."""
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


LIGHT = """
import json, sys
from moe_finetune import cli
commands, unused = json.load(sys.stdin)
for command in commands:
    assert cli.main(command) == 0, command
    assert not set(unused) & sys.modules.keys(), (command, set(unused) & sys.modules.keys())
"""


@pytest.mark.more
def test_init_and_preview_do_without_trl(tiny_checkpoint, tmp_path):
    """TRL's trainers take most of an import's time, and these two train nothing."""
    base = str(tiny_checkpoint("qwen3_moe"))
    rows = {
        "sft": {"prompt": "a b", "completion": " c"},
        "dpo": {"prompt": "a b", "chosen": " c", "rejected": " d"},
        "grpo": {"prompt": "a b", "answer": "c"},
    }
    inits = []
    for stage, row in rows.items():
        lines = [json.dumps({**row, "prompt": f"a {n}"}) for n in range(20)]
        (tmp_path / f"{stage}.jsonl").write_text("\n".join(lines) + "\n")
        command = ["init", base, "--data", f"{stage}.jsonl", "--stage", stage]
        inits.append([*command, "--output", f"{stage}.yaml"])
    shown = [["preview", "sft.yaml"], ["preview", "grpo.yaml"]]
    for commands, unused in ((inits, ["trl"]), (shown, ["trl", "peft"])):
        child = subprocess.run(
            [sys.executable, "-c", LIGHT],
            input=json.dumps([commands, unused]),
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_the_number_of_steps_needs_no_trl(stage):
    config = STAGES[stage].config_class()
    fields = config.__dataclass_fields__
    assert {name: fields[name].default for name in DEFAULTS} == DEFAULTS


def test_what_the_source_does_not_show_is_refused_before_a_run():
    """A name of an enum, which only TRL's class has."""
    values = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    recipe = recipe_from_tree(Tree({**values, "trainer": {"optim": "adamw_torch"}}))
    check_trainer_keys(recipe)
    wrong = recipe.model_copy(update={"trainer": {"optim": "adamm"}})
    with pytest.raises(RecipeError, match=r"trainer\.optim: must be .*'adamw_torch'"):
        check_trainer_keys(wrong)


def test_a_preset_may_be_a_plugin_s(monkeypatch):
    """A recipe's plugins are imported after the early check."""
    monkeypatch.delitem(sys.modules, "moe_finetune.losses.presets", raising=False)
    method = {"method": {"preset": "of_a_plugin"}}
    with pytest.raises(RecipeError, match="unknown preset 'of_a_plugin'"):
        refuse_unknown_preset(Tree(method))
    refuse_unknown_preset(Tree({**method, "plugins": ["my_plugin"]}))
