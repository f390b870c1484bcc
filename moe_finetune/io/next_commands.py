"""Commands that a user may paste next."""

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "moe-finetune"
Line = tuple[str, Sequence[str]]
"""What a command is for, and its words."""


def listed(commands: Sequence[Line]) -> str:
    """Commands to paste, each after what it is for."""
    return "\n".join(["next:", *(f"  {what:<24}{shlex.join(words)}" for what, words in commands)])


def program() -> str:
    """How the user's shell starts this program: by its path where its folder is not on PATH."""
    called = sys.argv[0]
    by_path = os.sep in called and Path(called).name == PROGRAM
    return called if by_path and shutil.which(PROGRAM) is None else PROGRAM


def new_run(folder: Path, *avoided: str) -> str:
    """A name for a run in ``folder`` that is not taken: first, second, ..., or ``run-N``."""
    names = itertools.chain(("first", "second", "third"), (f"run-{n}" for n in itertools.count(4)))
    paths = (str(folder / name) for name in names)
    return next(path for path in paths if path not in avoided and not Path(path).exists())


def losses(stage: str) -> tuple[str, str]:
    """Overrides of the run that one without added losses is compared with.

    The recommended shares were measured in stage sft.
    """
    share = "recommended" if stage == "sft" else "0.1"
    return ("method=orthogonal_variance", f"method.share={share}")


def other_method(
    recipe: Sequence[str], stage: str, plain: bool, run: str, other: str
) -> list[Line]:
    """The run with losses for one without, or without for one with; and the report of both.

    Args:
        recipe: files and overrides of ``run``.
        plain: whether ``run`` has no added losses.
        other: the folder of the second run.
    """
    changes = losses(stage) if plain else ("method=none",)
    baseline, compared = (run, other) if plain else (other, run)
    both = str(Path(run).parent / "both")
    return [
        ("with the other method", [program(), "train", *recipe, *changes, "--output", other]),
        ("compare both", [program(), "report", baseline, compared, "--output", both]),
    ]
