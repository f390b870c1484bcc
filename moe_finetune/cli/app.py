"""The application that verbs register with, and the arguments that several of them take."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moe_finetune.io import write_new

RESUMED = "the same command with --resume continues"
CONTINUED = {
    **dict.fromkeys(("study", "upcycle"), f"{RESUMED}, if the output exists"),
    **dict.fromkeys(("eval", "demo"), "the same command continues"),
    **dict.fromkeys(("serve", "doctor", "init", "inspect", "preview"), ""),
    **dict.fromkeys(("report", "compare", "verify", "ask"), ""),
}
"""How an interrupted verb goes on; the others write nothing before they are done."""


ORDER = (
    *("init", "preview", "train", "ask", "report", "merge", "verify", "convert", "inspect"),
    *(
        "eval",
        "compare",
        "serve",
        "analyze",
        "select",
        "prune",
        "study",
        "upcycle",
        "demo",
        "doctor",
    ),
)
"""The verbs as ``--help`` lists them: what most people need first."""


class Verbs(TyperGroup):
    """The verbs; reports an interrupt, whose message typer drops."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs' names in :data:`ORDER`."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            if not str(interrupt):  # else training has reported what is saved and how to go on
                unwritten = "nothing was written; repeat the command"
                how = CONTINUED.get(str(ctx.invoked_subcommand), unwritten)
                print(f"interrupted{'; ' if how else ''}{how}", file=sys.stderr)
            raise


app = typer.Typer(
    name="moe-finetune",
    cls=Verbs,
    help="Fine-tune Mixture-of-Experts language models with losses that encourage expert "
    "specialization.",
    epilog="With any verb: --quiet shows only warnings and results, --debug shows the "
    "traceback of an error, --plugin FILE|NAME runs your Python file or an installed plugin, "
    "which registers model families, losses or rewards.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TOGETHER = "train"
"""The verb whose processes work together."""
ADVICE = {
    "study": "; for several runs at once use --shard I/N",
    "upcycle": "; for several GPUs repeat the command with --resume for each, with its "
    "CUDA_VISIBLE_DEVICES",
}

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.")]
RecipeItems = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE... [key.path=value ...]",
        help="Recipe files, and values that override theirs.",
        show_default=False,
    ),
]


@dataclass
class Common:
    """Options of every verb, accepted anywhere on the command line."""

    debug: bool = False
    quiet: bool = False
    plugins: list[str] = field(default_factory=list)


def split_common(arguments: Sequence[str]) -> tuple[list[str], Common]:
    """Separate the common options from the other arguments; those after ``--`` are left alone."""
    common = Common()
    others: list[str] = []
    words = iter(arguments)
    for argument in words:
        if argument == "--":
            return [*others, argument, *words], common
        if argument == "--debug":
            common.debug = True
        elif argument == "--quiet":
            common.quiet = True
        elif argument == "--plugin" or argument.startswith("--plugin="):
            file = argument.partition("=")[2] or next(words, "")
            if not file:
                raise ValueError("--plugin: expected a Python file, or an installed plugin's name")
            common.plugins.append(file)
        else:
            others.append(argument)
    return others, common


def check_alone(arguments: Sequence[str]) -> None:
    """Refuse a single-process verb if a launcher started several processes."""
    verb = next((word for word in arguments if not word.startswith("-")), None)
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes == "1" or verb in (None, TOGETHER) or {"-h", "--help"} & set(arguments):
        return
    raise ValueError(
        f"{verb}: was started as one of {processes} processes (accelerate launch or torchrun), "
        f"but only {TOGETHER} runs on several processes; start it without a launcher"
        + ADVICE.get(str(verb), "")
    )


def split_items(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a list of arguments into recipe files and ``key.path=value`` overrides."""
    overrides = [item for item in items if "=" in item and not Path(item).is_file()]
    return [item for item in items if item not in overrides], overrides


def write_json(document: object, output: Path | None) -> None:
    """Write ``document`` to a new file, or print it."""
    from json import dumps

    text = dumps(document, indent=2, allow_nan=False)
    if output is None:
        print(text)
    else:
        write_new(output, text + "\n")
