"""Start one run: in this process, in a child process, or in one under ``accelerate launch``.

A child shares the run's lock with its parent. If a run outlives its killed study, the next study
waits for it and does not start it twice.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from moe_finetune.errors import StudyError
from moe_finetune.experiments import folder as disk
from moe_finetune.experiments.expand import Run
from moe_finetune.experiments.recipe import LaunchSection
from moe_finetune.io.children import run_child
from moe_finetune.io.ledger import Attempt, step_error
from moe_finetune.io.run_folder import RunFolder

Start = Callable[[Run, Path, Attempt], None]
"""Function of (run, the study's folder, the attempt) that carries out the run, or raises."""


def starter(launch: LaunchSection, folder: Path = Path()) -> Start:
    """Return the function that carries out one run, as set by ``launch``.

    ``launch.config`` is relative to ``folder``.

    Raises:
        StudyError: the launcher's configuration file is missing.
    """
    if launch.kind == "inline":
        return inline
    command = [sys.executable, "-m", "moe_finetune.cli"]
    if launch.kind == "accelerate" or launch.config is not None:
        if launch.config is None:
            raise StudyError(
                "launch.config: is missing; give an accelerate configuration, such as "
                "recipes/hardware/fsdp2_8gpu.yaml"
            )
        config = folder / launch.config
        if not config.is_file():
            raise StudyError(f"launch.config: no file {config}")
        command = [
            *(sys.executable, "-P", "-m", "accelerate.commands.launch"),
            *("--config_file", str(config), "-m", "moe_finetune.cli"),
        ]
    return lambda run, output, attempt: child(command, run, output, attempt)


def inline(run: Run, output: Path, attempt: Attempt) -> None:
    """Carry out ``run`` in this process."""
    from moe_finetune.run import run_recipe

    folder = disk.run_folder(output, run.name)
    run_recipe(run.recipe, folder, resume=RunFolder(folder).recipe.exists())


def child(command: list[str], run: Run, output: Path, attempt: Attempt) -> None:
    """Carry out ``run`` with ``command train ...``; its output goes to its log.

    Raises:
        StepFailedError: the run failed, for the reason given; MachineError if memory, disk or a
            signal ended it.
        KeyboardInterrupt: SIGINT or SIGTERM, after the process has saved its checkpoint.
    """
    folder = disk.run_folder(output, run.name)
    arguments = ["train", str(disk.recipe_file(output, run.name)), "--output", str(folder)]
    if RunFolder(folder).recipe.exists():
        arguments.append("--resume")
    failure = run_child([*command, *arguments], attempt.log, attempt.lock)
    if failure is not None:
        raise step_error(failure)
