"""The versions that recipes need; losses, metrics, callback and context manager run on older ones.

``pyproject.toml`` declares the wider range, so that the package installs next to other trainers.
"""

import importlib.metadata as metadata
import sys

from packaging.requirements import Requirement

from moe_finetune.errors import DependencyError

RECIPES = (
    "transformers>=5.19,<5.20",
    "peft>=0.21,<0.22",
    "trl>=1.16,<1.17",
    "accelerate>=1.15",
    "datasets>=5.0",
)


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
    """Refuse to run a recipe with versions on which only the callback runs.

    Raises:
        DependencyError: names what to install.
    """
    if unfit := unfit_for_recipes():
        requirements = list(unfit)
        installed = [f"{Requirement(line).name} {version}" for line, version in unfit.items()]
        raise DependencyError(
            f"{purpose} needs {' and '.join(requirements)}, found {' and '.join(installed)}; "
            "losses, metrics and SpecializationCallback work with these versions. Install: "
            f"{sys.executable} -m pip install {' '.join(repr(line) for line in requirements)}"
        )
