"""Print a benchmark's figures, and save them with ``--save``."""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from moe_finetune.io.environment import describe_environment

RESULTS = Path(__file__).resolve().parent / "results"


def add_save(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--save [NAME]``, with ``name`` as the default NAME."""
    parser.add_argument(
        "--save", nargs="?", const=name, metavar="NAME", help=f"write results/NAME.json ({name})"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the same to FILE")


def commit() -> str:
    """The commit of the code, with ``+`` if files differ from it."""
    command = ["git", "-C", str(RESULTS), "describe", "--always", "--abbrev=40", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not in a git repository"


def finish(arguments: argparse.Namespace, figures: dict[str, Any], show: bool = True) -> None:
    """Print ``figures`` as JSON, and save them with the command and the machine."""
    if show:
        print(json.dumps(figures, indent=2))
    if arguments.save or arguments.write:
        # Paths do not matter for a figure.
        given = {k: v for k, v in vars(arguments).items() if not isinstance(v, Path)}
        how = {
            "arguments": {k: v for k, v in given.items() if k != "save" and v is not None},
            "commit": commit(),
            "environment": describe_environment(),
            "load": round(os.getloadavg()[0], 1),
        }
        assert not how.keys() & figures.keys(), how.keys() & figures.keys()
        text = json.dumps({**how, **figures}, indent=2)
        for place in [
            RESULTS / f"{arguments.save}.json" if arguments.save else None,
            arguments.write,
        ]:
            if place is not None:
                place.write_text(text + "\n", encoding="utf-8")
