"""Chromium for the tests of the page; `python -m tests.browser` installs it where there is none.

The package itself needs no browser, so set-up leaves it out and `make test` asks for it, once.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from moe_finetune.io.system_package import install, install_command

NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium"
SECONDS = 120


def system_browser() -> str | None:
    """Path of the system's Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def own_browser() -> bool:
    """Whether Playwright has one of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        return Path(started.chromium.executable_path).is_file()


def ensure_browser() -> str:
    """Install Chromium where none is and no password is asked; return what to say of it."""
    if system_browser() or own_browser():
        return ""
    done = install(PACKAGE)
    if done is not None and done[0] and system_browser():
        return f"chromium installed with {done[1]}, so that the page is tested"
    command = [sys.executable, "-m", "playwright", "install", "chromium"]
    try:
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        remedy = install_command(PACKAGE) or f"{sys.executable} -m playwright install chromium"
        why = f" ({done[1]})" if done is not None else ""
        return f"no Chromium here{why}, so the page will not be tested; install it: {remedy}"
    return "chromium installed by Playwright, so that the page is tested"


if __name__ == "__main__":
    if said := ensure_browser():
        print(said)
