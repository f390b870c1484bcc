"""Run the steps of one folder once each: finished steps are kept, interrupted ones resumed.

A step is identified by the hash of its inputs (plain values; files by content, not by path or time)
and of the steps that it builds on. Its product is ``FOLDER/NAME``, which appears whole;
``steps/NAME.json`` then records the hash. ``work/NAME`` has what must survive an interruption.
While a step runs, ``locks/NAME`` is locked. Processes that the step starts may hold the lock too,
so that a later process waits for a child that outlived its parent. A step that failed has the
reason in ``logs/NAME.failed.json``, next to its log.
"""

import json
import logging
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_finetune.errors import (
    MachineError,
    MoeFinetuneError,
    OutputBusyError,
    OutputExistsError,
    RecipeError,
)
from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.children import Failure
from moe_finetune.io.done import DoneNote
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.lock import output_lock
from moe_finetune.io.run_folder import RunFolder

log = logging.getLogger(__name__)
FORMAT = 2
INPUTS_FILE = "inputs.json"


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step.

    Attributes:
        target: path of the product, which must appear whole, by a rename.
        work: folder for what must survive an interruption; it exists.
        log: file for the output of processes that the step starts.
        lock: descriptor of the step's lock, for such processes.
    """

    target: Path
    work: Path
    log: Path
    lock: int


@dataclass(frozen=True)
class Step:
    """A unit of work that is done once.

    Attributes:
        name: its product's path below the ledger's folder, such as ``seed-0/experts/3``.
        inputs: plain values that determine the product.
        after: names of the steps that it reads.
        costly: its product and its work folder are deleted only at the user's request.
        done: tells whether the product is complete, for a step that records this itself; the ledger
            then writes no note, and ``make`` starts again or continues.
        finish: called with the step's duration in seconds, before it counts as done.
    """

    name: str
    make: Callable[[Attempt], object] = field(repr=False)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    stage: str = ""
    costly: bool = False
    done: Callable[[], bool] | None = field(default=None, repr=False)
    finish: Callable[[float], object] | None = field(default=None, repr=False)


class Ledger:
    """The steps of one folder, in an order in which they can be done.

    Args:
        folder: the folder; the caller locks it, exclusively or shared.
        steps: each after those that it builds on.
        replace: delete costly products that were made from other inputs.
    """

    def __init__(
        self,
        folder: Path,
        steps: Sequence[Step],
        *,
        replace: bool = False,
    ):
        self.folder, self.replace = folder, replace
        self.steps = {step.name: step for step in steps}
        self._keys: dict[str, str] = {}
        for step in steps:
            required_keys = [self._keys[name] for name in step.after]
            self._keys[step.name] = sha256_json(
                [FORMAT, step.name, dict(step.inputs), required_keys]
            )

    # -- what is there ------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """Hash of a step's inputs and of the steps that it builds on."""
        return self._keys[name]

    def done(self, name: str) -> bool:
        """Return whether a step's product exists and was made from these inputs."""
        is_done = self.steps[name].done
        if is_done is not None:
            return is_done()
        return (self.folder / name).is_dir() and self._note(name).is_of(self._keys[name])

    def of_stage(self, stage: str) -> list[str]:
        return [name for name, step in self.steps.items() if step.stage == stage]

    def seconds(self) -> dict[str, float]:
        noted = {name: self._note(name).read().get("seconds") for name in self.steps}
        return {name: float(seconds) for name, seconds in noted.items() if seconds is not None}

    def failed_file(self, name: str) -> Path:
        """File with the reason why a step failed."""
        return self.folder / "logs" / f"{name}.failed.json"

    def log_file(self, name: str) -> Path:
        """File with the output of a step's processes, or the traceback of its error."""
        return self.folder / "logs" / f"{name}.log"

    def check_nothing_lost(self, names: Iterable[str]) -> None:
        """Refuse to repeat steps whose costly products were made from other inputs.

        Raises:
            OutputExistsError: there are such steps, and ``replace`` is not set.
        """
        lost = [] if self.replace else [line for name in names for line in self._lost(name)]
        if lost:
            lines = "\n".join(f"  {line}" for line in lost[:8])
            more = f"\n  and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise OutputExistsError(
                f"{self.folder}: contains results of other inputs than the present "
                f"ones:\n{lines}{more}\nNothing was deleted. Continue with its original "
                "settings, choose another --output, or add --replace to delete it and train it "
                "again"
            )

    # -- doing it -----------------------------------------------------------------------------

    def run(self, name: str) -> None:
        """Do a step unless it is done; wait if another process is doing it.

        Raises:
            RecipeError: a step that it builds on is missing or out of date.
            OutputExistsError: its costly product was made from other inputs.
            Exception: the step's error; its reason is recorded.
        """
        if self.done(name):
            log.info("%s: done already", name)
            return
        self._check_before(name)
        with self._alone(name) as lock:
            if self.done(name):  # by the process that we waited for
                log.info("%s: done already", name)
            else:
                self._do(self.steps[name], lock)

    def attempt(self, name: str) -> str | None:
        """Do a step unless it is done; return why it failed, or None."""
        try:
            self.run(name)
        except MoeFinetuneError as error:
            return str(error)
        except Exception as error:  # one step's failure must not end the others
            return _reason(error, self.log_file(name))
        return None

    def _do(self, step: Step, lock: int) -> None:
        name = step.name
        target, workspace = self.folder / name, self.folder / "work" / name
        self.failed_file(name).unlink(missing_ok=True)
        started = time.perf_counter()
        if step.done is None and self._appeared(name):
            log.info("%s: had finished before an interruption; its result is kept", name)
        else:
            if step.done is None:
                self._make_room(name)
            log.info("%s: begins", name)
            try:
                step.make(Attempt(target, workspace, self.log_file(name), lock))
            except Exception as error:
                self._note_failure(name, error)
                raise
        seconds = round(time.perf_counter() - started, 1)
        if step.finish is not None:
            step.finish(seconds)
        if step.done is None:
            inputs = {"from": dict(step.inputs)}
            self._note(name).write(self._keys[name], seconds=seconds, **inputs)
            shutil.rmtree(workspace)
        log.info("%s: %.1f s", name, seconds)

    def _check_before(self, name: str) -> None:
        step = self.steps[name]
        for required in step.after:
            if self.done(required):
                continue
            stage = self.steps[required].stage
            what = "is out of date" if (self.folder / required).exists() else "is missing"
            raise RecipeError(
                f"--stage {step.stage}: {self.folder / required} {what}; run --stage {stage} "
                "first, or leave --stage out"
            )

    @contextmanager
    def _alone(self, name: str) -> Iterator[int]:
        """Take the step's lock; wait for a process that has it, with a log line."""
        lock_path = self.folder / "locks" / name
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(output_lock(lock_path))
            except OutputBusyError:
                log.warning("%s: another process is running this step; waiting for it to end", name)
                lock = stack.enter_context(output_lock(lock_path, wait=True))
            yield lock.descriptor

    def _appeared(self, name: str) -> bool:
        """Return whether the product appeared but its process was killed before the note."""
        return (self.folder / name).is_dir() and self._is_begun(name)

    def _is_begun(self, name: str) -> bool:
        """Return whether the step's work folder belongs to these inputs."""
        return _text(self.folder / "work" / name / INPUTS_FILE) == self._keys[name]

    def _make_room(self, name: str) -> None:
        """Remove files made from other inputs; keep those of an interrupted attempt."""
        self.check_nothing_lost([name])
        target, workspace = self.folder / name, self.folder / "work" / name
        self._note(name).remove()
        if target.exists():
            shutil.rmtree(target)
        if workspace.exists() and not self._is_begun(name):
            shutil.rmtree(workspace)
        if not workspace.exists():
            workspace.mkdir(parents=True)
            write_atomic(workspace / INPUTS_FILE, self._keys[name])

    def _lost(self, name: str) -> Iterator[str]:
        step, workspace = self.steps[name], self.folder / "work" / name
        if not step.costly or step.done is not None or self.done(name) or self._appeared(name):
            return
        if (self.folder / name).exists():
            yield f"{name}: {self._difference(name)}"
        elif RunFolder(workspace).checkpoints.exists() and not self._is_begun(name):
            yield f"work/{name}: checkpoints of an interrupted training run with other inputs"

    def _difference(self, name: str) -> str:
        noted, step = self._note(name).read(), self.steps[name]
        earlier = noted.get("from")
        if earlier is None:
            return (
                "made by an earlier version of this package"
                if noted
                else "not recorded as finished"
            )
        now = json.loads(json.dumps(dict(step.inputs), default=str))
        changed = sorted(key for key in {*earlier, *now} if earlier.get(key) != now.get(key))
        if changed:
            return f"made with other values of {', '.join(changed)}"
        return f"made from another {' or '.join(step.after)}"

    # -- notes --------------------------------------------------------------------------------

    def _note(self, name: str) -> DoneNote:
        return DoneNote(self.folder / "steps" / f"{name.replace('/', '.')}.json")

    def _note_failure(self, name: str, error: Exception) -> None:
        reason = str(error)
        if not isinstance(error, MoeFinetuneError):
            file = self.log_file(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write("".join(traceback.format_exception(error)))
            reason = _reason(error, file)
        write_atomic(self.failed_file(name), json.dumps({"reason": reason}, indent=1) + "\n")


def step_error(failure: Failure, remedy: str = "") -> MoeFinetuneError:
    """The error to raise for a process that did not finish its step."""
    kind = MachineError if failure.machine else StepFailedError
    return kind(f"{failure}{remedy}")


class StepFailedError(MoeFinetuneError, RuntimeError):
    """The process of a step failed; the message is the process's."""


def _reason(error: Exception, file: Path) -> str:
    return f"{type(error).__name__}: {error} (traceback in {file})"


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None
