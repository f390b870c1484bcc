"""Checkpoints of the Hugging Face hub: what is downloaded, at which commit, and from its cache
alone, without retries, when the hub cannot be reached.
"""

import os
import sys
from functools import cache
from pathlib import Path

from moe_finetune.io.terminal import terminal

SECONDS = 10.0
"""Seconds to wait for the hub's first answer."""

SMALL_FILES = ("*.json", "*.jinja", "tiktoken.model", "LICENSE*", "README.md")
"""All of a checkpoint but its weights: no code, no pickle."""

_commits: dict[str, str] = {}


def commit_of(repository: str, revision: str | None = None) -> str | None:
    """The commit to read: the one that this process or its run has opened, else ``revision``."""
    return _commits.get(f"{repository}@{revision or ''}", revision)


def opened_commit(repository: str, revision: str | None, commit: str) -> None:
    """Note that ``commit`` was opened, so that every later read is of the same content."""
    if len(commit) == 40 and set(commit) <= set("0123456789abcdef"):
        _commits[f"{repository}@{revision or ''}"] = commit


def opened_commits() -> dict[str, str]:
    """All of them, for a run's notes."""
    return dict(_commits)


def continue_with(commits: dict[str, str]) -> None:
    """Read the commits that a run has noted."""
    _commits.update(commits)


def download(repository: str, revision: str | None, weights: bool) -> Path:
    """The local copy of a repository at ``revision``; ``weights``: with its safetensors files."""
    from huggingface_hub import snapshot_download

    check_hub()
    patterns = [*SMALL_FILES, *(["*.safetensors"] if weights else [])]
    commit = commit_of(repository, revision)
    folder = Path(snapshot_download(repository, revision=commit, allow_patterns=patterns))
    opened_commit(repository, revision, folder.name)
    return folder


@cache
def check_hub() -> None:
    """Contact the hub once per process; if it does not answer, go offline and print one line.

    Otherwise its client retries every request for about 20 seconds. Processes started afterwards
    are offline too. Does nothing if ``HF_HUB_OFFLINE`` is set.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # from the client's library and from the system
        terminal().say(
            f"{constants.ENDPOINT} cannot be reached ({error}); only cached models and data are "
            "available",
            "warning",
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # the module copies the variable when imported
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
