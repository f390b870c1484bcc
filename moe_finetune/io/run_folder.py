"""What a verb takes from a folder that another verb has left."""

from __future__ import annotations

import os
from pathlib import Path

from moe_finetune.errors import CheckpointError
from moe_finetune.io.environment import PACKAGES
from moe_finetune.io.json_file import read_object


def checkpoint_in(source: str | Path) -> str | Path:
    """The checkpoint that ``source`` names: a run's ``merged/``, or ``source`` itself.

    Raises:
        CheckpointError: an adapter, or a run that was not merged.
    """
    path = Path(source)
    if (path / "config.json").is_file():
        return source
    if (path / "merged" / "config.json").is_file():
        return path / "merged"
    if (path / "adapter").is_dir() or (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} holds an adapter and no merged checkpoint; write one with 'moe-finetune merge "
            f"{path} --output DIR' and give that, or give the base with --adapter"
        )
    return source


def checkpoint_name(source: str | Path) -> str:
    """What to call the checkpoint that ``source`` names: its folder, its run, or the hub id."""
    if not Path(source).is_dir():
        return str(source)
    path = Path(os.path.abspath(source))  # a link keeps its name
    return path.parent.name if path.name == "merged" else path.name


def results_in(source: str | Path) -> Path:
    """The folder with ``results.json`` that ``source`` names: a run's ``eval/``, or ``source``."""
    path = Path(source)
    if not (path / "results.json").is_file() and (path / "eval" / "results.json").is_file():
        return path / "eval"
    return path


def recipe_of_run(path: str | Path) -> Path | None:
    """``recipe.yaml`` of the run that ``path`` is or lies in; None where it is in no run.

    Other tools write a file of that name too: a run's ``environment.json`` lists this package.
    """
    for folder in (Path(path), Path(path).parent):
        recipe, environment = folder / "recipe.yaml", folder / "environment.json"
        if not recipe.is_file() or not environment.is_file():
            continue
        try:
            packages = read_object(environment, CheckpointError, "").get("packages")
        except CheckpointError:  # also another tool's
            continue
        if isinstance(packages, dict) and PACKAGES[0] in packages:
            return recipe
    return None
