"""Whether generated programs can be run here, and the command that installs a sandbox."""

import os
import shutil
import sys

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.sandbox import Sandbox

INSTALLERS = {
    "apt-get": "apt-get install -y bubblewrap libseccomp2",
    "dnf": "dnf install -y bubblewrap libseccomp",
    "zypper": "zypper install bubblewrap libseccomp2",
    "pacman": "pacman -S bubblewrap libseccomp",
    "apk": "apk add bubblewrap libseccomp",
}


def sandbox_state() -> tuple[str | None, str]:
    """Return the kind of sandbox that works here, or None and the reason.

    Test programs are run in it, which takes a second.
    """
    try:
        return Sandbox().kind, ""
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
    for installer, command in INSTALLERS.items():
        if shutil.which(installer):
            return command if os.geteuid() == 0 else f"sudo {command}"
    return "install bubblewrap and libseccomp with your system's packages"


def missing() -> bool:
    """Whether bubblewrap is missing, on Linux."""
    return sys.platform.startswith("linux") and shutil.which("bwrap") is None
