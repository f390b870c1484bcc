"""What pip installs: versions that agree, entry points that exist, files outside the package."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pinned_versions_satisfy_every_requirement():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        pin.name: str(next(iter(pin.specifier)).version)
        for pin in (Requirement(line) for line in lines if line and not line.startswith("#"))
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(r for rs in extras.values() for r in rs)]
    met = 0
    for requirement in map(Requirement, wanted):
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), requirement
            met += 1
    assert met >= len(pins), "a pinned version belongs to no requirement"


def test_entry_points_exist():
    groups = [PROJECT["project"]["scripts"], *PROJECT["project"]["entry-points"].values()]
    for group in groups:
        for target in group.values():
            module, _, name = target.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_every_folder_of_tasks_and_recipes_is_installed():
    installed = PROJECT["tool"]["setuptools"]["data-files"]
    for pattern in ("eval/tasks/*", "eval/suites", "recipes/*"):
        for folder in ROOT.glob(pattern):
            if not folder.is_dir() or not any(folder.glob("*.yaml")):
                continue
            name = folder.relative_to(ROOT)
            globs = installed.get(f"share/moe-finetune/{name}", [])
            found = {file for glob in globs for file in ROOT.glob(glob)}
            wanted = {*folder.glob("*.yaml"), *folder.glob("*.py")}
            assert wanted <= found, f"pyproject: data-files lacks {name}"


def test_public_names():
    import moe_finetune

    for name in moe_finetune.__all__:
        assert getattr(moe_finetune, name)
    assert moe_finetune.__version__ == PROJECT["project"]["version"]
