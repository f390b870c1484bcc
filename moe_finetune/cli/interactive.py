"""Verbs for a person at a terminal: write a recipe, look at its data."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_finetune.cli.app import RecipeItems, app, split_items

if TYPE_CHECKING:
    from moe_finetune.training.before.starter_recipe import Answers


@app.command()
def init(
    items: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT] [key.path=value ...]",
            help="Checkpoint folder or hub id, and keys of the recipe.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows to learn from: file, folder or hub id.")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option("--validation", help="Rows to measure on; default: a tenth of the rows."),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="A preset; default: none, no added loss.")
    ] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Tasks to evaluate.")] = None,
    stage: Annotated[
        str, typer.Option("--stage", help="sft, dpo (prompt, chosen, rejected) or grpo (prompt).")
    ] = "sft",
    gpu: Annotated[
        float | None,
        typer.Option(
            "--gpu", help="GiB of the GPU to write it for, such as 24; default: this machine."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The recipe to write; must not exist.")
    ] = Path("recipe.yaml"),
) -> None:
    """Write a recipe to start from. On a terminal it asks for the options that you leave out.

    Example: moe-finetune init ./my-moe --data my.jsonl --gpu 24 --output my.yaml
    """
    from moe_finetune.cli.missing import refuse_missing
    from moe_finetune.errors import RecipeError
    from moe_finetune.io.atomic import refuse_existing
    from moe_finetune.recipe.stages import STARTERS
    from moe_finetune.recipe.yaml_tree import Tree, load_tree

    words, overrides = split_items(items or [])
    values = load_tree([], overrides).values
    stage = str(values.get("stage", stage))
    if len(words) > 1:
        raise RecipeError(f"{words[1]}: expected one checkpoint, then keys such as lora.rank=8")
    if stage not in STARTERS:
        raise RecipeError(f"--stage {stage}: init writes recipes for {', '.join(STARTERS)}")
    if gpu is not None and not 0 < gpu < 1e6:
        raise RecipeError(f"--gpu: must be the GiB of one GPU, such as 24, not {gpu:g}")
    checkpoint = words[0] if words else _of(values, "model", "path")
    has_rows = data is not None or _of(values, "data", "train") is not None
    asks = sys.stdin.isatty()
    if not asks and (checkpoint is None or not has_rows):
        missing = "CHECKPOINT" if checkpoint is None else "--data"
        raise RecipeError(f"{missing}: required, because there is no terminal to ask on")
    refuse_existing(output)
    if checkpoint is not None and has_rows:
        sections = {"stage": stage, "model": {"path": checkpoint}}
        sections |= {"data": {"train": data, "validation": validation}} if data else {}
        sections |= {"evaluation": {"suite": suite}} if suite else {}
        tree = Tree(sections)
        tree.merge(load_tree([], overrides))
        refuse_missing(tree)
    from moe_finetune.losses.presets import PRESETS
    from moe_finetune.training.before.starter_recipe import (
        HELD_OUT,
        Answers,
        check_method,
        describe,
        write_starter,
    )

    if checkpoint is None:
        checkpoint = _ask("Checkpoint (folder or hub id)", describe)
    print(describe(checkpoint)[0])
    answers = Answers(checkpoint, data, validation or HELD_OUT, method or "none", suite, stage,
                      tuple(overrides))  # fmt: skip
    if not has_rows:
        read = lambda name: replace(answers, data=name).rows  # noqa: E731
        answers = replace(answers, data=_ask("Rows to learn from (file, folder or hub id)", read))
        if validation is None and _of(values, "data", "validation") is None:
            question = "Rows to measure on (a file, or the share to hold out)"
            check = lambda name: _share(name) or not name or read(name)  # noqa: E731
            measured = _ask(question, check, default=str(HELD_OUT))
            answers = replace(answers, validation=_share(measured) or measured or None)
    if method is None and asks and _of(values, "method", "preset") is None:
        for preset in PRESETS.values():
            print(f"  {preset.name:<34}{preset.shows}")
        answers = replace(answers, method=_ask("Method", check_method, default="none"))
    warning = write_starter(answers, output, gpu)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"recipe: {output}\n\n{_following(answers, output, gpu)}")


def _of(values: dict[str, Any], section: str, key: str) -> Any:
    """A key of a section of overrides, or None."""
    inside = values.get(section)
    return inside.get(key) if isinstance(inside, dict) else None


def _share(text: str) -> float | None:
    """The share of rows to hold out, if ``text`` is one."""
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def _following(answers: "Answers", recipe: Path, gpu: float | None) -> str:
    """The next commands: look, train, and the run to compare with."""
    from moe_finetune.io.next_commands import Line, listed, new_run, other_method, program

    first = new_run(Path("runs"))
    train = [program(), "train", str(recipe)]
    fits = [*train, "--output", first, "--dry-run"]
    if gpu is not None:
        fits = [
            program(),
            "inspect",
            answers.checkpoint,
            "--recipe",
            str(recipe),
            "--gpu",
            f"{gpu:g}",
        ]
    lines: list[Line] = [
        ("see the tokenized rows", [program(), "preview", str(recipe)]),
        ("see whether it fits", fits),
        ("train", [*train, "--output", first]),
    ]
    second, plain = new_run(Path("runs"), first), answers.preset == "none"
    lines += other_method([str(recipe)], answers.stage, plain, first, second)
    return listed(lines)


def _ask(question: str, check: Callable[[str], object], default: str | None = None) -> str:
    """Ask until ``check`` accepts the answer."""
    from moe_finetune.errors import MoeFinetuneError

    while True:
        answer = typer.prompt(question, default=default)
        try:
            check(answer)
        except MoeFinetuneError as problem:
            print(f"{problem}")
        else:
            return answer


@app.command()
def preview(
    items: RecipeItems,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows to show.")] = 3,
) -> None:
    """Show a recipe's data: format, rows, learned tokens, lengths.

    Example: moe-finetune preview recipes/models/olmoe_1b_7b.yaml data.train=my.jsonl --rows 5
    """
    from moe_finetune.cli.missing import refuse_missing
    from moe_finetune.recipe.yaml_tree import load_tree

    tree = load_tree(*split_items(items))
    refuse_missing(tree)
    from moe_finetune.recipe.schema import recipe_from_tree
    from moe_finetune.training.before.preview import preview as show

    print(show(recipe_from_tree(tree), rows, sys.stdout.isatty()))
