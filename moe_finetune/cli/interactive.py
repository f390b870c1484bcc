"""Verbs for a person at a terminal: write a recipe, look at its data."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from moe_finetune.cli.app import RecipeItems, app, split_items


@app.command()
def init(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub id.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Rows to learn from: file, folder or hub id.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option("--validation", help="Rows to measure on.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="A preset; default: orthogonal_variance (sft) or none."),
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
    from moe_finetune.errors import RecipeError
    from moe_finetune.recipe.stages import STARTERS

    if stage not in STARTERS:
        raise RecipeError(f"--stage {stage}: init writes recipes for {', '.join(STARTERS)}")
    if gpu is not None and not 0 < gpu < 1e6:
        raise RecipeError(f"--gpu: must be the GiB of one GPU, such as 24, not {gpu:g}")
    from moe_finetune.losses.presets import PRESETS
    from moe_finetune.report.end_of_run import listed, program
    from moe_finetune.training.before.starter_recipe import (
        Answers,
        check_method,
        describe,
        layout,
        write_starter,
    )

    asks = sys.stdin.isatty()
    if not asks and (checkpoint is None or data is None):
        missing = "CHECKPOINT" if checkpoint is None else "--data"
        raise RecipeError(f"{missing}: required, because there is no terminal to ask on")
    if checkpoint is None:
        checkpoint = _ask("Checkpoint (folder or hub id)", describe)
    print(describe(checkpoint)[0])
    if data is None:
        data = _ask("Rows to learn from (file, folder or hub id)", lambda name: layout(name, stage))
        rows = lambda name: name and layout(name, stage)  # noqa: E731
        validation = validation or _ask("Rows to measure on", rows, default="") or None
    if method is None and asks:
        for preset in PRESETS.values():
            print(f"  {preset.name:<34}{preset.shows}")
        method = _ask("Method", check_method, default=STARTERS[stage])
    answers = Answers(checkpoint, data, validation, method, suite, stage)
    warning = write_starter(answers, output, gpu)
    names = (name for name in ("first", "second", "third") if not Path("runs", name).exists())
    run = f"runs/{next(names, output.stem)}"
    train = [program(), "train", str(output), "--output", run]
    fits = [*train, "--dry-run"]
    if gpu is not None:
        fits = [program(), "inspect", checkpoint, "--recipe", str(output), "--gpu", f"{gpu:g}"]
    following = [
        ("see the tokenized rows", [program(), "preview", str(output)]),
        ("see whether it fits", fits),
        ("train", train),
    ]
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"recipe: {output}\n\n{listed(following)}")


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
    from moe_finetune.recipe.schema import load_recipe

    recipe = load_recipe(*split_items(items))
    from moe_finetune.training.before.preview import preview as show  # after wrong keys are known

    print(show(recipe, rows, sys.stdout.isatty()))
