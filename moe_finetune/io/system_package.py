"""Packages of the operating system: the command that installs one, and unattended installation."""

import os
import shutil
import subprocess

_INSTALLERS = {
    "apt-get": "apt-get update && apt-get install -y {}",
    "dnf": "dnf install -y {}",
    "zypper": "zypper --non-interactive install {}",
    "pacman": "pacman -Sy --noconfirm {}",
    "apk": "apk add {}",
}
_SECONDS = 600


def install_command(package: str) -> str | None:
    """The command with which a person installs ``package`` here; None without an installer."""
    installer = _installer()
    if installer is None:
        return None
    command = _INSTALLERS[installer].format(package)
    if os.geteuid() == 0:
        return command
    return " && ".join(f"sudo {part}" for part in command.split(" && "))


def install(package: str) -> tuple[bool, str] | None:
    """Install ``package``; return whether it worked, and the installer or the error.

    Returns None if there is no installer, or if it would ask for a password.
    """
    installer, prefix = _installer(), _root_prefix()
    if installer is None or prefix is None:
        return None
    for part in _INSTALLERS[installer].format(package).split(" && "):
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
            return False, str(error)
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            return False, f"'{part}' says {lines[-1]}"
    return True, installer


def _installer() -> str | None:
    return next((name for name in _INSTALLERS if shutil.which(name)), None)


def _root_prefix() -> list[str] | None:
    """The prefix that runs a command as root; None if that asks for a password."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        return None
    result = subprocess.run(["sudo", "-n", "true"], capture_output=True, stdin=subprocess.DEVNULL)
    return ["sudo", "-n"] if result.returncode == 0 else None
