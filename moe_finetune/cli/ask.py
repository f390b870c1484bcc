"""The verb that asks a model one question."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from moe_finetune.cli.app import app
from moe_finetune.io.counted import counted
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal


@app.command()
def ask(
    source: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|ADAPTER", help="What answers.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="Your question.", show_default=False),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system turn before the question.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the text as it stands, without the chat template.")
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest tokens.")
    ] = 0.0,
    base: Annotated[
        str | None, typer.Option("--base", help="Base checkpoint; default: the adapter's own.")
    ] = None,
) -> None:
    """Ask a run's model, a checkpoint or an adapter one question, in transformers.

    Example: moe-finetune ask runs/first "What does a router do?"
    """
    if not words:
        example = f'moe-finetune ask {source} "What does a router do?"'
        raise typer.BadParameter(f"QUESTION is missing: add it in quotes, as in {example}")
    from moe_finetune.models.config_and_tokenizer import existing_folder, local_folder
    from moe_finetune.models.family_lookup import warn_of_plugins

    existing_folder(source)  # before the libraries are imported
    from moe_finetune.cli.checkpoints import base_of
    from moe_finetune.data.row_forms import FIELDS
    from moe_finetune.data.trained_form import CHAT, trained_form
    from moe_finetune.evaluation.ask import ask as answer
    from moe_finetune.evaluation.ask import source_of

    warn_of_plugins(Path(source))
    if not raw and (form := trained_form(RunFolder(source))) not in (None, CHAT):
        terminal().say(
            f"{source} was trained on rows of {' and '.join(FIELDS[form])}, not on chats; --raw "
            "asks without the chat template"
        )
    chosen = source_of(source, lambda adapter: local_folder(base) if base else base_of(adapter))

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    with terminal().announced("ask"):
        ended = answer(
            chosen,
            " ".join(words),
            write,
            system=system,
            raw=raw,
            max_tokens=max_tokens,
            temperature=temperature,
        )
    write("\n")
    if not ended:
        terminal().say(f"cut after {counted(max_tokens, 'token')}; --max-tokens N allows more")
