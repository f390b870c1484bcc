"""What a verb takes from a folder that another verb has left."""

from __future__ import annotations

from pathlib import Path

from moe_finetune.errors import CheckpointError


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


def results_in(source: str | Path) -> Path:
    """The folder with ``results.json`` that ``source`` names: a run's ``eval/``, or ``source``."""
    path = Path(source)
    if not (path / "results.json").is_file() and (path / "eval" / "results.json").is_file():
        return path / "eval"
    return path
