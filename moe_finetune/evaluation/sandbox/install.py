"""Is there a sandbox for generated programs on this machine, and the command that installs one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.sandbox import Sandbox

_INSTALLERS = {
    "apt-get": "apt-get update && apt-get install -y bubblewrap",
    "dnf": "dnf install -y bubblewrap",
    "zypper": "zypper --non-interactive install bubblewrap",
    "pacman": "pacman -Sy --noconfirm bubblewrap",
    "apk": "apk add bubblewrap",
}
_SECONDS = 600


def sandbox_state() -> tuple[str | None, str]:
    """Return the kind of sandbox that works here (or None) and why there is none (or "").

    Programs are run in it to find out, which takes a second.
    """
    try:
        with Sandbox() as sandbox:
            return sandbox.kind, ""
    except DependencyError as error:
        return None, str(error)


def no_sandbox() -> str:
    """Why generated programs cannot be scored here, and what to do; "" where they can."""
    kind, trouble = sandbox_state()
    if kind is not None:
        return ""
    return f"no sandbox to score programs in: {install_command()}" if missing() else trouble


def install_command() -> str:
    """The one command that installs bubblewrap here, for a person."""
    for name, command in _INSTALLERS.items():
        if shutil.which(name):
            if os.geteuid() == 0:
                return command
            return " && ".join(f"sudo {part}" for part in command.split(" && "))
    return "install bubblewrap with your system's packages, or docker"


def missing() -> bool:
    """Whether bubblewrap is what lacks: on Linux, without any bwrap."""
    return sys.platform.startswith("linux") and shutil.which("bwrap") is None


def repair_sandbox() -> list[str]:
    """Install bubblewrap where no sandbox works and no password is asked; say what was done."""
    if not missing() or sandbox_state()[0] is not None:
        return []
    installer = next((name for name in _INSTALLERS if shutil.which(name)), None)
    prefix = _root_prefix()
    if installer is None or prefix is None:
        return []
    for part in _INSTALLERS[installer].split(" && "):
        try:
            done = subprocess.run(
                [*prefix, *part.split()],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                timeout=_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"bubblewrap was not installed: {error}"]
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            return [f"bubblewrap was not installed: '{part}' says {said}"]
    return [f"bubblewrap installed with {installer}, so that generated programs can be scored"]


def _root_prefix() -> list[str] | None:
    """What a command needs before it to run as root; None where that asks for a password."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    asked = subprocess.run(["sudo", "-n", "true"], capture_output=True, stdin=subprocess.DEVNULL)
    return ["sudo", "-n"] if asked.returncode == 0 else None
