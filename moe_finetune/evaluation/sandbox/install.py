"""Check for a sandbox for generated programs, and install bubblewrap."""

import shutil
import sys

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.io.system_package import install, install_command

PACKAGE = "bubblewrap"


def sandbox_state() -> tuple[str | None, str]:
    """Return the kind of sandbox that works here, or None and the reason.

    Test programs are run in it, which takes a second.
    """
    try:
        with Sandbox() as sandbox:
            return sandbox.kind, ""
    except DependencyError as error:
        return None, str(error)


def no_sandbox() -> str:
    """Why generated programs cannot be scored here, with the remedy; "" if they can."""
    kind, trouble = sandbox_state()
    if kind is not None:
        return ""
    return f"no sandbox to score programs in: {remedy()}" if missing() else trouble


def remedy() -> str:
    """The command that installs bubblewrap here."""
    return install_command(PACKAGE) or "install bubblewrap with your system's packages, or docker"


def missing() -> bool:
    """Whether bubblewrap is missing, on Linux."""
    return sys.platform.startswith("linux") and shutil.which("bwrap") is None


def repair_sandbox() -> list[str]:
    """Install bubblewrap if no sandbox works and no password is needed; return what was done."""
    if not missing() or sandbox_state()[0] is not None:
        return []
    done = install(PACKAGE)
    if done is None:
        return []
    worked, message = done
    if not worked:
        return [f"bubblewrap was not installed: {message}"]
    return [f"bubblewrap installed with {message}, so that generated programs can be scored"]
