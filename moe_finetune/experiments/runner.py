"""Carry out a study: run what is not finished, record failures, write the tables."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import StudyError
from moe_finetune.experiments import folder as disk
from moe_finetune.experiments.expand import Run, different_routers, expand
from moe_finetune.experiments.launch import Start, starter
from moe_finetune.experiments.recipe import StudyRecipe
from moe_finetune.experiments.results import StudyResults, load_results
from moe_finetune.io import output_lock, write_atomic
from moe_finetune.io.ledger import Ledger, Step
from moe_finetune.io.run_folder import RunFolder

if TYPE_CHECKING:
    from moe_finetune.experiments.table import Table

log = logging.getLogger(__name__)


def run_study(
    study: StudyRecipe,
    output: str | Path,
    resume: bool = False,
    shard: tuple[int, int] | None = None,
) -> StudyResults:
    """Carry out ``study`` in the folder ``output`` and return its results.

    Args:
        study: what to run; see :func:`~moe_finetune.experiments.recipe.load_study`.
        output: the study's folder; new or empty, unless ``resume`` or ``shard``.
        resume: skip finished runs and resume the others.
        shard: ``(i, n)`` runs every n-th run from the i-th, counted from 1; shards may share a
            folder, one after another or at the same time.

    Raises:
        StudyError, RecipeError: the study is invalid, or a run in the folder is damaged or from
            another study.
        OutputExistsError: the folder contains other files.
        OutputBusyError: another process carries out this study, or shards of it.
        KeyboardInterrupt: SIGINT or SIGTERM, after the current run has saved its checkpoint.
    """
    output = Path(output)
    with output_lock(output, shared=shard is not None):
        runs = expand(study)
        if difference := different_routers(runs):
            log.warning(difference)
        mine = shard_of(runs, shard)
        with output_lock(output / disk.MANIFEST, wait=True):
            disk.prepare(study, runs, output, resume or shard is not None)
        carry_out(mine, output, starter(study.launch, config_folder(study)), study.discard)
        with output_lock(output / "tables", wait=True):
            results = load_results(output)
            write_tables(results)
    return results


def shard_of(runs: Sequence[Run], shard: tuple[int, int] | None) -> list[Run]:
    """The runs of one shard; all without one."""
    if shard is None:
        return list(runs)
    index, of = shard
    if not 1 <= index <= of:
        raise StudyError(f"shard {index}/{of}: expected i/n with i from 1 to n")
    return list(runs[index - 1 :: of])


def config_folder(study: StudyRecipe) -> Path:
    """The folder that paths in ``launch`` are relative to: that of the study's file."""
    return study.file.parent if study.file is not None else Path()


def carry_out(runs: Sequence[Run], output: Path, start: Start, discard: Sequence[str] = ()) -> None:
    """Start the runs one after another; a failure is recorded and the others continue.

    ``discard`` names folders of a run that are deleted once it is finished.
    """
    ledger = Ledger(output, [_step(run, output, start) for run in runs])
    for index, run in enumerate(runs, 1):
        why = ledger.attempt(run.name)
        if why is not None:
            label = f"[{index}/{len(runs)}] {run.arm} seed {run.seed}"
            log.error("%s: failed: %s", label, why)
            continue
        for name in discard:
            shutil.rmtree(disk.run_folder(output, run.name) / name, ignore_errors=True)


def _step(run: Run, output: Path, start: Start) -> Step:
    folder = disk.run_folder(output, run.name)
    return Step(
        run.name,
        lambda attempt: start(run, output, attempt),
        done=RunFolder(folder).finished.is_file,
        finish=lambda seconds: disk.record_finished(folder, run.recipe.hash, seconds),
    )


def write_tables(results: StudyResults) -> Table | None:
    """Write ``tables/study.{csv,tex,json,txt}`` and ``report/index.html``; None without results."""
    from moe_finetune.experiments import render
    from moe_finetune.experiments.page import write_page
    from moe_finetune.experiments.table import make_table

    if not results.finished:
        return None
    table = make_table(results)
    content = {
        "csv": render.to_csv(table),
        "tex": render.to_latex(table),
        "json": render.to_json_text(table),
        "txt": render.to_text(table),
    }
    for suffix, text in content.items():
        write_atomic(results.folder / "tables" / f"study.{suffix}", text)
    write_page(results, table, RunFolder(results.folder).page)
    return table
