"""A study as Slurm jobs: through submitit where it is installed, else as a script for sbatch.

Either way one job runs one shard of the study with the command line of this package, so a job that
is sent away goes on where it stopped when the study is started again with ``--resume``.
"""

from __future__ import annotations

import importlib.util
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


def submit(study: StudyRecipe, runs: Sequence[Run], output: Path) -> list[str]:
    """Submit the study's jobs and return their ids; none when only the script could be written.

    Raises:
        StudyError: a study that was not read from a file, or an option that sbatch cannot have.
    """
    jobs = min(study.launch.jobs or len(runs), len(runs))
    command = shard_command(study, output)
    check_options(study.launch.options)
    if importlib.util.find_spec("submitit") is not None:
        return _through_submitit(study, command, jobs, output)
    if study.launch.cluster == "local":
        raise StudyError("launch.cluster: local needs submitit; pip install submitit")
    script = output / "slurm" / "study.sbatch"
    write_atomic(script, batch_script(study, command, jobs, output))
    if shutil.which("sbatch") is None:
        log.warning("no sbatch here: submit the study where there is one: sbatch %s", script)
        return []
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StudyError(f"sbatch {script}: {done.stderr.strip()}")
    log.info("submitted %s: %d jobs", done.stdout.strip(), jobs)
    return [done.stdout.strip()]


def shard_command(study: StudyRecipe, output: Path) -> list[str]:
    """The command of one shard, without the shard's number."""
    if study.file is None:
        raise StudyError("launch.kind: slurm needs a study that was read from a file")
    kind = "accelerate" if study.launch.config else "process"
    return [
        *(sys.executable, "-m", "moe_finetune.cli", "study", str(study.file.resolve())),
        *(*study.given, f"launch.kind={kind}"),
        *("--output", str(output.resolve()), "--resume"),
    ]


def check_options(options: dict[str, str | int]) -> None:
    """Refuse what is not a long option of sbatch, or would end its line."""
    for name, value in options.items():
        if name == "time":
            raise StudyError("launch.options.time: set launch.hours")
        if not _OPTION.fullmatch(name) or "\n" in str(value):
            raise StudyError(
                f"launch.options.{name}: {value!r} is not an option of sbatch; write its long "
                "name, such as cpus-per-task: 8"
            )


def batch_script(study: StudyRecipe, command: list[str], jobs: int, output: Path) -> str:
    """A job array with one line of work."""
    options = {
        "job-name": study.name,
        "array": f"1-{jobs}",
        "output": str(output.resolve() / "slurm" / "%A_%a.log"),
        "chdir": str(Path.cwd()),
        "time": str(minutes(study)),
        "signal": "B:TERM@120",
        **study.launch.options,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    work = f'exec {shlex.join(command)} --shard "$SLURM_ARRAY_TASK_ID/{jobs}"'
    return "\n".join(["#!/bin/bash", *lines, work]) + "\n"


def minutes(study: StudyRecipe) -> int:
    """The time limit of a job, as sbatch and submitit count it."""
    return math.ceil(60 * study.launch.hours)


def run_shard(command: list[str]) -> int:
    """The work of one of submitit's jobs: the command, its exit code; 1 is a failed run, noted."""
    code = subprocess.run(command, check=False).returncode
    if code not in (0, 1):
        raise RuntimeError(f"exit code {code}: {shlex.join(command)}")
    return code


def _through_submitit(study: StudyRecipe, command: list[str], jobs: int, output: Path) -> list[str]:
    import submitit

    local = study.launch.cluster == "local"
    executor = submitit.AutoExecutor(folder=output / "slurm", cluster="local" if local else "slurm")
    executor.update_parameters(name=study.name, timeout_min=minutes(study))
    if not local:
        executor.update_parameters(slurm_additional_parameters=dict(study.launch.options))
    with executor.batch():
        started = [
            executor.submit(run_shard, [*command, "--shard", f"{number}/{jobs}"])
            for number in range(1, jobs + 1)
        ]
    log.info("submitted %d jobs; their logs are in %s", jobs, output / "slurm")
    if local:
        for job in started:
            job.result()
    return [job.job_id for job in started]
