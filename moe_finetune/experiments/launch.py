"""Start one run: in this process, in a child process, or in one under ``accelerate launch``.

A child holds the run's lock as well as its parent, so that a run whose study was killed, and which
goes on by itself, is waited for and never started twice.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from moe_finetune.errors import MoeFinetuneError, StudyError
from moe_finetune.experiments import folder as disk
from moe_finetune.experiments.expand import Run
from moe_finetune.experiments.recipe import LaunchSection
from moe_finetune.io import write_atomic
from moe_finetune.io.children import failure

log = logging.getLogger(__name__)
Start = Callable[[Run, Path, int], str | None]
"""(run, the study's folder, descriptor of the held lock) -> why it failed, or None."""


def starter(launch: LaunchSection, folder: Path = Path()) -> Start:
    """The function that carries out one run the way ``launch`` says.

    ``folder`` is where ``launch.config`` is relative to.

    Raises:
        StudyError: a launcher without its configuration file.
    """
    if launch.kind == "inline":
        return inline
    command = [sys.executable, "-m", "moe_finetune.cli"]
    if launch.kind == "accelerate" or launch.config is not None:
        if launch.config is None:
            raise StudyError(
                "launch.config: is missing; name accelerate's configuration, such as "
                "recipes/hardware/fsdp2_8gpu.yaml"
            )
        config = folder / launch.config
        if not config.is_file():
            raise StudyError(f"launch.config: there is no file {config}")
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)),
            *("-m", "moe_finetune.cli"),
        ]
    return lambda run, output, lock: child(command, run, output, lock)


def inline(run: Run, output: Path, lock: int) -> str | None:
    """Carry ``run`` out in this process."""
    from moe_finetune.run import run_recipe

    folder = disk.run_folder(output, run.name)
    try:
        run_recipe(run.recipe, folder, resume=(folder / "recipe.yaml").exists())
    except MoeFinetuneError as error:
        return str(error)
    except Exception as error:  # one run's failure must not end the others
        file = disk.log_file(output, run.name)
        write_atomic(file, traceback.format_exc())
        return f"{type(error).__name__}: {error} (traceback in {file})"
    return None


def child(command: list[str], run: Run, output: Path, lock: int) -> str | None:
    """Carry ``run`` out with ``command train ...``; what it prints goes to its log."""
    folder, file = disk.run_folder(output, run.name), disk.log_file(output, run.name)
    arguments = ["train", str(disk.recipe_file(output, run.name)), "--output", str(folder)]
    if (folder / "recipe.yaml").exists():
        arguments.append("--resume")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        start = stream.tell()
        # A session of its own: Ctrl-C reaches it once, through us, and not twice.
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,
        )
        with forwarded(process):
            code = process.wait()
    return None if code == 0 else failure(file, start, code)


@contextmanager
def forwarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to ``process``; raise KeyboardInterrupt when it has ended."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if process.poll() is None:
            process.send_signal(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


@contextmanager
def held(output: Path, name: str) -> Iterator[int]:
    """Hold the run's lock; wait for whoever holds it now. Yields the descriptor."""
    file = output / "locks" / f"{name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("%s: another process runs it; waiting for it to end", name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
