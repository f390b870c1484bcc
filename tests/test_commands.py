"""Every fenced command and Python block of the pages is carried out, with a tiny checkpoint.

The folder has what the pages name: ``./my-moe``, ``my.jsonl``, the ``my.yaml`` that a page shows.
``train`` runs twice and is a dry run afterwards. What needs a hub, a GPU, or an hour is parsed with
all its options, and its recipe is read and checked.
"""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset
from transformers import Qwen3MoeForCausalLM

from eval.placement import __main__ as placement
from moe_finetune import cli
from moe_finetune.cli.app import split_common, split_items
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.study.recipe import StudyRecipe, find_study, load_study
from moe_finetune.upcycle.schema import load_upcycle_recipe
from recipes.upcycle.corpus import SOURCES
from tests.conftest import ROOT
from tests.support import documents, registries, tiny
from tests.upcycle import dense

pytestmark = pytest.mark.usefixtures("warm")  # for rehearsals of runs

BLOCKS = documents.blocks()
COMMANDS = [
    (block.page, words) for block in BLOCKS if not block.language for words in block.commands()
]
PROGRAMS = typer.main.get_command(cli.app).commands
SMALL = ["trainer.max_steps=2", "data.max_length=48", "model.dtype=float32", "evaluation=null",
         "trainer.per_device_train_batch_size=2", "lora.rank=4"]  # fmt: skip
TRAINED = ("runs/first", "runs/second")
RUN = {"inspect", "init", "convert", "preview", "report", "merge", "analyze", "select", "prune"}
# Added to commands that would take a hub, an engine or an hour.
LOOK = {"train": "--dry-run", "eval": "--check"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_checkpoint):
    """The folder that a reader works in, with what the pages take for granted."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my-moe").symlink_to(tiny_checkpoint("deepseek_v2"))
    sums = [
        {"prompt": f"{n} + {n * n % 7} =", "completion": f" {n + n * n % 7}"} for n in range(40)
    ]
    write_rows(folder / "my.jsonl", sums)
    for name, word in (("law", "court"), ("math", "sum")):
        texts = [{"text": f"The {word} of {n} and {n * 3 % 11} is the {word}."} for n in range(30)]
        write_rows(folder / f"{name}.jsonl", texts)
    questions = [
        {"question": f"What is {n} and 1?", "answer": f"{n + 1}\n#### {n + 1}"} for n in range(9)
    ]
    choices = [{"prompt": f"{n}?", "chosen": f" {n}", "rejected": " no"} for n in range(20)]
    write_rows(folder / "preferences.jsonl", choices)
    answers = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(20)]
    write_rows(folder / "prompts.jsonl", answers)
    write_rows(folder / "DATA" / "gsm8k_test.jsonl", questions)
    write_rows(folder / "DATA" / "gsm8k_train.jsonl", questions)
    texts = {name: str(folder / "law.jsonl") for name in SOURCES}
    pretrain = {"tokenizer": "runs/texts/tokenizer"}  # as recipes.upcycle.corpus writes it
    (folder / "runs/texts").mkdir(parents=True)
    (folder / "runs/texts/texts.yaml").write_text(
        yaml.safe_dump({"dense": {"pretrain": pretrain}, "texts": {"categories": texts}})
    )
    for name in ("annotations.csv", "study/sheets/gsm8k/key.json", "table.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    shown = next(b for b in BLOCKS if b.page == "docs/first-run.md" and b.language == "yaml")
    (folder / "other.yaml").write_text(shown.text)
    studied = next(
        b for b in BLOCKS if b.page == "docs/reference/study.md" and b.language == "yaml"
    )
    (folder / "study.yaml").write_text(studied.text)
    (folder / "my_family.py").touch()  # my-moe's family is known
    before = os.getcwd()
    os.chdir(folder)
    with registries.as_before():
        yield folder
    os.chdir(before)


def write_rows(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parsed(words: list[str]) -> None:
    """Let the verb's own parser read the words: unknown options and missing ones are errors."""
    others, _ = split_common(words[2:])
    PROGRAMS[words[1]].make_context(words[1], others)


def checked(words: list[str]) -> None:
    """Read what the command would read, without a checkpoint."""
    parsed(words)
    items = [word for word in words[2:] if word.endswith(".yaml") or re.match(r"[\w.]+=", word)]
    if words[1] == "train":
        load_recipe(*split_items(items))
    elif words[1] == "upcycle":
        load_upcycle_recipe(*split_items(items))
    elif words[1] == "study":
        load_study(find_study(words[2]), items[1:])


def local(words: list[str]) -> bool:
    """Whether every checkpoint that the words name is the tiny one."""
    return any(
        word in ("my.yaml", "other.yaml", "model.path=./my-moe", "./my-moe") for word in words
    )


def carry_out(words: list[str], trained: set[str]) -> str:
    """Run or check one ``moe-finetune`` command; say which."""
    if len(words) == 2 and words[1].startswith("--"):
        if words[1] != "--install-completion":  # it would change the shell's own files
            assert cli.main(words[1:]) == 0, words
        return "run"
    verb = words[1]
    if verb == "train" and local(words) and words[-1] in TRAINED and words[-1] not in trained:
        trained.add(words[-1])
        assert cli.main([*words[1:], *SMALL]) == 0, words
        return "run"
    if verb in RUN or (verb == "train" and local(words) and "supervised_routing" not in str(words)):
        parsed(words)
        if verb == "init":  # several pages begin with their own recipe of this name
            Path(words[words.index("--output") + 1]).unlink(missing_ok=True)
        look = [LOOK[verb]] if verb in LOOK and LOOK[verb] not in words else []
        assert cli.main([*words[1:], *look]) == 0, words
        return "run"
    if verb == "eval" and "DATA" in words and "runs/first" in words:
        assert cli.main([*words[1:], *([] if "--check" in words else ["--check"])]) == 0, words
        return "run"
    checked(words)
    return "checked"


def other(words: list[str]) -> None:
    """A command of another program: what it names exists here."""
    program, text = words[0], " ".join(words)
    if program == "make":
        assert re.search(rf"^{words[1]}:.*##", (ROOT / "Makefile").read_text(), re.M), words
    elif program == "accelerate":
        given = launch_command_parser().parse_args(words[2:])
        assert given.module and given.training_script == "moe_finetune.cli"
        assert given.config_file is None or (ROOT / given.config_file).is_file()
        checked(["moe-finetune", *given.training_script_args])
    elif words[:3] == ["python", "-m", "eval.placement"]:
        placement.app(words[3:], standalone_mode=False)
    elif program == "python":
        path = ROOT / words[2].replace(".", "/")
        module = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        source = (module if words[1] == "-m" else ROOT / words[1]).read_text()
        for option in (word for word in words if word.startswith("--")):
            names = f'"{option}"', f" {option[2:].replace('-', '_')}:"  # argparse, typer
            assert any(name in source for name in names), words
    elif program == "docker":
        named = re.search(r"-f (\S+)", text)
        assert named is None or (ROOT / named[1]).is_file(), words
    else:
        assert program in ("pip", "pipx", "uv", "vllm", "sbatch"), f"unknown program: {words}"
        found = re.search(r"\[(\w+)\]", text)
        assert found is None or found[1] in EXTRAS, words


def test_every_command(place, p0_released):
    """In order and in one process. A command that several pages show is carried out once."""
    seen: set[tuple[str, ...]] = set()
    trained: set[str] = set()
    done = {"run": 0, "checked": 0}
    for page, words in COMMANDS:
        if tuple(words) in seen:
            continue
        seen.add(tuple(words))
        try:
            if words[0] == "moe-finetune":
                done[carry_out(words, trained)] += 1
            else:
                other(words)
        except BaseException as problem:
            raise AssertionError(f"{page}: {' '.join(words)}: {problem}") from problem
    assert trained == set(TRAINED)
    assert done["run"] >= 25, done


def test_every_python_block(place, tiny_checkpoint, monkeypatch, caplog):
    """Blocks run as written, on a model as ``from_pretrained`` gives it, and no loss drowns."""
    import trl

    given = trl.SFTConfig
    few = {"use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none"}
    monkeypatch.setattr(trl, "SFTConfig", lambda *args, **kwargs: given(*args, **few, **kwargs))
    for seed, name in enumerate(("law", "code", "prose", "mathematics")):
        dense.save("llama", place / name, seed)
    blocks = [block for block in BLOCKS if block.language == "python"]
    assert len(blocks) >= 7
    for block in blocks:
        model = Qwen3MoeForCausalLM.from_pretrained(tiny_checkpoint("qwen3_moe"))
        batches = [tiny.batch(seed=seed) for seed in range(2)]
        rows = [{"text": f"{n} and {n * n}"} for n in range(6)]
        names = {
            "model": model,
            "batches": batches,
            "loader": batches,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
            "dataset": Dataset.from_list(rows),
            "tokenizer": tiny.tokenizer(),
        }
        try:
            exec(compile(block.text, block.page, "exec"), names)
        except BaseException as problem:
            raise AssertionError(f"{block.page}: {problem}\n{block.text}") from problem
        # A snippet that measures the papers' weights may find that they are too strong.
        drowns = "drowns" in caplog.text and "measure_strength" not in block.text
        assert not drowns, f"{block.page}\n{block.text}"
        caplog.clear()


def test_every_yaml_block_is_a_recipe_or_suite(place):
    """Keys are right; a part of a recipe is completed."""
    from moe_finetune.evaluation.suites import Suite
    from moe_finetune.upcycle.schema import UpcycleRecipe

    whole = {"model": {"path": "x"}, "data": {"train": "x"}, "lora": {"rank": 4}}
    checked = 0
    for block in BLOCKS:
        if block.language != "yaml":
            continue
        keys = yaml.safe_load(block.text.replace(", ...}", "}"))
        if "tasks" in keys:
            Suite.model_validate(keys)
        elif "axes" in keys:
            assert set(keys) <= set(StudyRecipe.model_fields), block.page
        elif "dense" in keys:
            assert set(keys) <= set(UpcycleRecipe.model_fields), block.page
        elif "stages" not in keys:
            file = place / f"block{checked}.yaml"
            file.write_text(yaml.safe_dump({**whole, **keys}))
            load_recipe(file)
        checked += 1
    assert checked >= 6
