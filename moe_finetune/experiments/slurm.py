"""A study as an array of Slurm jobs: a script for sbatch, submitted if sbatch exists.

One job runs one shard of the study with the command line of this package, so a preempted job
resumes when the study is started again.
"""

import logging
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_finetune.errors import StudyError
from moe_finetune.experiments.expand import Run
from moe_finetune.experiments.recipe import StudyRecipe
from moe_finetune.io import write_atomic

log = logging.getLogger(__name__)
_OPTION = re.compile(r"[a-z][a-z-]*")


def submit(study: StudyRecipe, runs: Sequence[Run], output: Path) -> None:
    """Write ``slurm/study.sbatch`` and submit it.

    Raises:
        StudyError: the study was not read from a file, an sbatch option is invalid, or sbatch
            failed.
    """
    jobs = min(study.launch.jobs or len(runs), len(runs))
    check_options(study.launch.options)
    script = output / "slurm" / "study.sbatch"
    write_atomic(script, batch_script(study, shard_command(study, output), jobs, output))
    if shutil.which("sbatch") is None:
        log.warning("sbatch is not installed here; on a login node, run: sbatch %s", script)
        return
    submitted = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if submitted.returncode:
        raise StudyError(f"sbatch {script}: {submitted.stderr.strip()}")
    log.info("submitted %s: %d jobs", submitted.stdout.strip(), jobs)


def shard_command(study: StudyRecipe, output: Path) -> list[str]:
    """The command of one shard, without the shard's index."""
    if study.file is None:
        raise StudyError("launch.kind: slurm needs a study that was read from a file")
    kind = "accelerate" if study.launch.config else "process"
    return [
        *(sys.executable, "-m", "moe_finetune.cli", "study", str(study.file.resolve())),
        *(*study.arguments, f"launch.kind={kind}"),
        *("--output", str(output.resolve()), "--resume"),
    ]


def check_options(options: dict[str, str | int]) -> None:
    """Refuse options that are not long options of sbatch, or that contain a line break."""
    for name, value in options.items():
        if name == "time":
            raise StudyError("launch.options.time: set launch.hours")
        if not _OPTION.fullmatch(name) or "\n" in str(value):
            raise StudyError(
                f"launch.options.{name}: {value!r} is not an option of sbatch; write its long "
                "name, such as cpus-per-task: 8"
            )


def batch_script(study: StudyRecipe, command: list[str], jobs: int, output: Path) -> str:
    """A job array whose job N runs shard N."""
    options = {
        "job-name": study.name,
        "array": f"1-{jobs}",
        "output": str(output.resolve() / "slurm" / "%A_%a.log"),
        "chdir": str(Path.cwd()),
        "time": str(math.ceil(60 * study.launch.hours)),
        "signal": "B:TERM@120",
        **study.launch.options,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    shard = f'exec {shlex.join(command)} --shard "$SLURM_ARRAY_TASK_ID/{jobs}"'
    return "\n".join(["#!/bin/bash", *lines, shard]) + "\n"
