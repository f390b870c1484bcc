"""Commands that a user may paste next."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "moe-finetune"


def listed(commands: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Commands to paste, each after what it is for."""
    return "\n".join(["next:", *(f"  {what:<24}{shlex.join(words)}" for what, words in commands)])


def program() -> str:
    """How the user's shell starts this program: by its path where its folder is not on PATH."""
    called = sys.argv[0]
    by_path = os.sep in called and Path(called).name == PROGRAM
    return called if by_path and shutil.which(PROGRAM) is None else PROGRAM
