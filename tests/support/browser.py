"""The system's Chromium, for the tests of the page; `make test` installs one."""

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def system_browser() -> str | None:
    """Path of the system's Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)
