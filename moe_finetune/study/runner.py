"""Carry out a study: run what is not finished, record failures, write the tables.

A process locks a run's log while it works on the run, and the run's own process locks its folder.
Several processes may therefore carry out one study, and a run that outlived its killed study is
waited for.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_finetune.errors import MachineError, MoeFinetuneError, OutputBusyError, StudyError
from moe_finetune.io import output_lock, write_atomic
from moe_finetune.io.child_progress import RunProgress, Watch
from moe_finetune.io.children import run_child
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.study import folder as disk
from moe_finetune.study.expand import Run, different_routers, expand
from moe_finetune.study.read_study import StudyResults, load_results
from moe_finetune.study.recipe import LaunchSection, StudyRecipe

log = logging.getLogger(__name__)
POLL = 0.5
"""Seconds between looks at runs that other processes carry out."""
Start = Callable[[Run, Path], None]
"""Function of (run, the study's folder) that carries out the run, or raises."""


class RunFailedError(MoeFinetuneError, RuntimeError):
    """The process of a run failed; the message is the process's."""


def run_study(
    study: StudyRecipe,
    output: str | Path,
    resume: bool = False,
    shard: tuple[int, int] | None = None,
) -> StudyResults:
    """Carry out ``study`` in the folder ``output`` and return its results.

    With ``resume``, finished runs are skipped, the others resumed, and a study that another process
    carries out is joined. ``shard`` ``(i, n)`` runs only every n-th run from the i-th, counted from
    1; shards may share a folder, at the same time, also on a file system without locks.
    """
    output, runs = Path(output), expand(study)
    if difference := different_routers(runs):
        log.warning(difference)
    chosen = shard_of(runs, shard)
    start = starter(study.launch, study.file.parent if study.file is not None else Path())
    # Studies wait for each other; beside another verb that writes the folder a study is refused.
    with output_lock(output / disk.MANIFEST, wait=True), output_lock(output):
        disk.prepare(study, runs, output, resume or shard is not None)
    carry_out(chosen, output, start, study.discard)
    with output_lock(output / "tables", wait=True):
        results = load_results(output)
        write_tables(results)
    return results


def shard_of(runs: Sequence[Run], shard: tuple[int, int] | None) -> list[Run]:
    """The runs of one shard; all without one."""
    index, of = shard or (1, 1)
    if not 1 <= index <= of:
        raise StudyError(f"shard {index}/{of}: expected i/n with i from 1 to n")
    return list(runs[index - 1 :: of])


def carry_out(runs: Sequence[Run], output: Path, start: Start, discard: Sequence[str] = ()) -> None:
    """Start the runs one after another; a failure is recorded and the others continue.

    Runs that other processes carry out come last, and are waited for. Folders to ``discard`` are
    deleted once their run is finished.
    """
    pending, announced = list(runs), set[str]()
    while pending:
        busy = [run for run in pending if not _attempt(run, output, start, discard)]
        for run in busy:
            if run.name not in announced:
                announced.add(run.name)
                log.warning("%s: another process is running it; waiting for it to end", run.name)
        if busy:
            time.sleep(POLL)
        pending = busy


def _attempt(run: Run, output: Path, start: Start, discard: Sequence[str]) -> bool:
    """Carry out ``run`` unless it is finished; return False if another process is doing so."""
    folder, failed = disk.run_folder(output, run.name), disk.failed_file(output, run.name)
    try:
        with output_lock(disk.log_file(output, run.name)):
            if folder.finished:
                log.info("%s: done already", run.name)
            elif _is_written(folder):
                return False
            else:
                log.info("%s: begins", run.name)
                failed.unlink(missing_ok=True)
                try:
                    start(run, output)
                except Exception as error:  # one run's failure must not end the others
                    if _is_written(folder):  # a process that outlived its study was faster
                        return False
                    expected = isinstance(error, MoeFinetuneError)
                    reason = str(error) if expected else f"{type(error).__name__}: {error}"
                    write_atomic(failed, reason)
                    log.error("%s: failed: %s", run.name, reason, exc_info=not expected)
                    return True
            for name in discard:
                shutil.rmtree(folder.path / name, ignore_errors=True)
    except OutputBusyError:
        return False
    return True


def _is_written(folder: RunFolder) -> bool:
    """Return whether a process is writing the run."""
    try:
        with output_lock(folder.path):
            return False
    except OutputBusyError:
        return True


def starter(launch: LaunchSection, folder: Path = Path()) -> Start:
    """Return the function that carries out one run, as set by ``launch``.

    ``launch.config`` is relative to ``folder``.
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
        accelerate = [sys.executable, "-P", "-m", "accelerate.commands.launch", "--config_file"]
        command = [*accelerate, str(config), "-m", "moe_finetune.cli"]
    return lambda run, output: child(command, run, output)


def inline(run: Run, output: Path) -> None:
    """Carry out ``run`` in this process."""
    from moe_finetune.run import run_recipe

    folder = disk.run_folder(output, run.name)
    run_recipe(run.recipe, folder.path, resume=folder.recipe.exists())


def child(command: list[str], run: Run, output: Path) -> None:
    """Carry out ``run`` with ``command train ...``; its output goes to its log."""
    folder, log = disk.run_folder(output, run.name), disk.log_file(output, run.name)
    recipe = disk.recipe_file(output, run.name)
    arguments = ["train", str(recipe), "--output", str(folder.path)]
    arguments += ["--resume"] if folder.recipe.exists() else []
    with terminal().phase(run.name):
        watch = Watch([RunProgress(folder, log)])
        failure = run_child([*command, *arguments], log, watch)
    if failure is not None:
        raise (MachineError if failure.machine else RunFailedError)(str(failure))


def write_tables(results: StudyResults) -> None:
    """Write ``tables/study.{csv,txt}`` and ``report/index.html``, if there are results."""
    from moe_finetune.study import render
    from moe_finetune.study.page import write_page
    from moe_finetune.study.table import make_table

    if not results.finished:
        return
    table, folder = make_table(results), results.folder / "tables"
    write_atomic(folder / "study.csv", render.to_csv(table))
    write_atomic(folder / "study.txt", render.to_text(table))
    write_page(results, table, RunFolder(results.folder).page)
