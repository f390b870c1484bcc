"""Steps that are done once: each names what it follows from, and is skipped while that holds.

A step writes one folder, which appears whole or not at all; ``steps/NAME.json`` then notes the hash
of its inputs. Inputs are the recipe's values that the step reads, outside files by their content,
and the steps that it builds on by their own hashes, so that a change is carried on to all that
follow. A step that was left half done is done again; a training goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.io import output_lock, write_atomic
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.json_file import read_object

log = logging.getLogger(__name__)
FORMAT = 1
INPUTS_FILE = "inputs.json"


@dataclass(frozen=True)
class Step:
    """One folder to make.

    Attributes:
        name: the folder's path below the output, such as ``seed-0/experts/3``.
        stage: the stage it belongs to.
        inputs: plain values that it follows from.
        after: names of the steps that it reads.
        make: writes the folder, given it and a folder for what must survive an interruption.
    """

    name: str
    stage: str
    inputs: Mapping[str, Any]
    after: tuple[str, ...]
    make: Callable[[Path, Path], None] = field(repr=False)


class Ledger:
    """The steps of one output folder, in order, and which of them are done."""

    def __init__(self, output: Path, steps: Sequence[Step]):
        self.output = output
        self.steps = {step.name: step for step in steps}
        self._keys: dict[str, str] = {}
        for step in steps:
            before = [self._keys[name] for name in step.after]
            self._keys[step.name] = sha256_json([FORMAT, step.name, dict(step.inputs), before])

    def key(self, name: str) -> str:
        """Hash of everything that a step follows from."""
        return self._keys[name]

    def done(self, name: str) -> bool:
        """Whether the folder is there and was made from these inputs."""
        return (self.output / name).is_dir() and self._noted(name) == self._keys[name]

    def run(self, name: str) -> None:
        """Do a step unless it is done.

        Raises:
            RecipeError: a step that it builds on is missing or out of date.
        """
        if self.done(name):
            log.info("%s: done already", name)
            return
        step = self.steps[name]
        for before in step.after:
            if not self.done(before):
                stage = self.steps[before].stage
                what = "is out of date" if (self.output / before).is_dir() else "is missing"
                raise RecipeError(
                    f"--stage {step.stage}: {self.output / before} {what}; run --stage {stage} "
                    "first, or leave --stage out"
                )
        # A process that trains one expert may need a step that another is at.
        with output_lock(self.output / name, wait=True):
            if not self.done(name):
                self._do(step)

    def _do(self, step: Step) -> None:
        name = step.name
        target, work = self.output / name, self.output / "work" / name
        self._mark(name).unlink(missing_ok=True)
        if target.exists():
            shutil.rmtree(target)
        if (work / INPUTS_FILE).is_file():
            held = (work / INPUTS_FILE).read_text(encoding="utf-8")
            if held != self._keys[name]:
                shutil.rmtree(work)
        elif work.exists():
            shutil.rmtree(work)
        if not work.exists():
            work.mkdir(parents=True)
            write_atomic(work / INPUTS_FILE, self._keys[name])
        log.info("%s: begins", name)
        started = time.perf_counter()
        step.make(target, work)
        seconds = round(time.perf_counter() - started, 1)
        note = {"inputs": self._keys[name], "seconds": seconds}
        write_atomic(self._mark(name), json.dumps(note) + "\n")
        shutil.rmtree(work)
        log.info("%s: %.1f s", name, seconds)

    def seconds(self) -> dict[str, float]:
        """How long each finished step took, where it was noted."""
        found = {}
        for name in self.steps:
            if self._mark(name).is_file():
                found[name] = float(self._note(name)["seconds"])
        return found

    def _mark(self, name: str) -> Path:
        return self.output / "steps" / f"{name.replace('/', '.')}.json"

    def _noted(self, name: str) -> str | None:
        if not self._mark(name).is_file():
            return None
        return self._note(name).get("inputs")

    def _note(self, name: str) -> dict[str, Any]:
        return read_object(self._mark(name), RecipeError, "delete it to do the step again")
