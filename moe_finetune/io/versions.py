"""The versions that recipes need, and the newest that this release was tested with.

``pyproject.toml`` declares lower bounds only, so that the package installs next to other trainers
and changes none of their versions.
"""

import functools
import importlib.metadata as metadata
import logging
import sys

from packaging.requirements import Requirement
from packaging.version import Version

from moe_finetune.errors import DependencyError

log = logging.getLogger(__name__)
RECIPES = (
    "transformers>=5.19",
    "peft>=0.21",
    "trl>=1.16",
    "accelerate>=1.15",
    "datasets>=5.0",
)
"""Losses, metrics, callback and context manager run on older ones."""
TESTED = {"transformers": "5.24", "peft": "0.21", "trl": "1.16", "accelerate": "1.15"}
"""The newest minor version of each package that this release was tested with."""


def unfit_for_recipes() -> dict[str, str]:
    """Requirements in :data:`RECIPES` that are not met -> installed version."""
    unfit = {}
    for line in RECIPES:
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "none"
        if version == "none" or not requirement.specifier.contains(version, prereleases=True):
            unfit[line] = version
    return unfit


def check_versions(purpose: str) -> None:
    """Refuse to run a recipe with versions on which only the callback runs."""
    if unfit := unfit_for_recipes():
        requirements = list(unfit)
        installed = [f"{Requirement(line).name} {version}" for line, version in unfit.items()]
        raise DependencyError(
            f"{purpose} needs {' and '.join(requirements)}, found {' and '.join(installed)}; "
            "losses, metrics and SpecializationCallback work with these versions. Install: "
            f"{sys.executable} -m pip install {' '.join(repr(line) for line in requirements)}"
        )


def untested() -> list[str]:
    """Packages that are newer than this release was tested with, such as ``"trl 1.17.0 (1.16)"``.

    The version in parentheses is the newest that was tested.
    """
    newer = []
    for name, tested in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(version).release[:2] > Version(tested).release:
            newer.append(f"{name} {version} ({tested})")
    return newer


@functools.cache
def warn_of_untested() -> None:
    """Name what :func:`untested` finds, and the command that proves it, once a process."""
    if newer := untested():
        log.warning(
            "newer than this release was tested with (in parentheses): %s; `moe-finetune inspect "
            "CHECKPOINT --prove --recipe RECIPE` compares gradients and a small training with "
            "plain transformers",
            ", ".join(newer),
        )
