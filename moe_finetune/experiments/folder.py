"""A study's folder: its runs and their states.

``study.json`` (the runs with the hashes of their recipes), ``recipes/ARM/seed_N.yaml``,
``runs/ARM/seed_N/`` (ordinary run folders), ``logs/ARM/seed_N.log``, ``locks/``, ``tables/`` and
``report/index.html``. A finished run has ``finished.json``: the hashes of its recipe and of the
files that tables read.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from moe_finetune.errors import OutputExistsError, StudyError
from moe_finetune.experiments.expand import REFERENCES, Run, reference_of
from moe_finetune.experiments.recipe import StudyRecipe
from moe_finetune.io import write_atomic
from moe_finetune.io.done import DoneNote
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.hashes import sha256_file
from moe_finetune.io.json_file import read_object
from moe_finetune.io.ledger import Ledger
from moe_finetune.io.run_folder import RunFolder

MANIFEST = "study.json"
SCHEMA = 1
State = Literal["finished", "started", "failed", "missing"]


def run_folder(output: Path, name: str) -> Path:
    """Folder of the run ``ARM/seed_N``."""
    return output / "runs" / name


def recipe_file(output: Path, name: str) -> Path:
    """File with the resolved recipe that the run is started with."""
    return output / "recipes" / f"{name}.yaml"


def failed_file(output: Path, name: str) -> Path:
    """The file that says why the run failed; it lies next to the log, outside the run's folder."""
    return Ledger(output, ()).failed_file(name)


def _check_same(runs: Sequence[Run], output: Path) -> None:
    """Refuse the folder of a study that has no run in common with this one.

    Studies that share runs are the same study with more or fewer seeds, models or methods.
    """
    remedy = "restore the file, or choose another --output"
    listed = read_object(output / MANIFEST, StudyError, remedy).get("runs")
    rows = listed if isinstance(listed, list) else []
    hashes = {row.get("recipe_sha256") for row in rows if isinstance(row, dict)}
    if hashes and hashes.isdisjoint(run.recipe.hash for run in runs):
        raise OutputExistsError(
            f"{output} contains another study, which shares no run with this one; choose another "
            "--output"
        )


def prepare(study: StudyRecipe, runs: Sequence[Run], output: Path, resume: bool) -> None:
    """Check the folder and write ``study.json`` and the runs' recipes into it.

    Raises:
        OutputExistsError: the folder contains other files, or this study and ``resume`` is not set.
        StudyError: a run in the folder belongs to another recipe, or is damaged.
    """
    exists = enter_folder(output, output / MANIFEST, "a study", resume)
    for run in runs:
        check_run(run, output)
    if exists:
        _check_same(runs, output)
    names = {axis: list(dict.fromkeys(run.values[axis] for run in runs)) for axis in study.axes}
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "name": study.name,
        "title": study.title or study.name,
        "source": study.source,
        "axes": names,
        "seeds": study.seeds,
        **{key: reference_of(study, key, names) for key in REFERENCES},
        "together": study.together,
        "benchmarks": study.benchmarks,
        "metrics": study.metrics,
        "runs": [
            {"arm": r.arm, "seed": r.seed, "values": r.values, "recipe_sha256": r.recipe.hash}
            for r in runs
        ],
    }
    # Written first, because it marks the folder as a study that other shards may join.
    write_atomic(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    for run in runs:
        write_atomic(recipe_file(output, run.name), run.recipe.to_yaml())


def check_run(run: Run, output: Path) -> None:
    """Raise StudyError if the folder's run is damaged or has another recipe."""
    from moe_finetune.recipe.schema import load_recipe

    folder = run_folder(output, run.name)
    saved = RunFolder(folder).recipe
    if not saved.is_file():
        if _note(folder).written:
            raise StudyError(f"{folder}: is finished but has no recipe.yaml; delete the folder")
        return
    if load_recipe(saved).hash != run.recipe.hash:
        raise StudyError(
            f"{folder}: was made with a different recipe ({saved}) than the study has now; "
            "choose another --output, or delete this run to redo it"
        )
    check_finished(folder)


def check_finished(folder: Path) -> None:
    """Raise StudyError if a finished run's files have changed since it finished."""
    for name, digest in _note(folder).read().get("files", {}).items():
        file = folder / name
        if not file.is_file() or sha256_file(file) != digest:
            what = "was changed" if file.is_file() else "is missing"
            raise StudyError(
                f"{file}: {what} after the run had finished; delete {folder} to redo the run"
            )


def record_finished(folder: Path, recipe_sha256: str, seconds: float) -> None:
    """Write ``finished.json``, after which the run is skipped."""
    files = {str(file.relative_to(folder)): sha256_file(file) for file in _tabulated(folder)}
    _note(folder).write(recipe_sha256, seconds=round(seconds, 1), files=files)


def _note(folder: Path) -> DoneNote:
    remedy = f"delete {folder} to redo the run"
    return DoneNote(RunFolder(folder).finished, StudyError, remedy)


def _tabulated(folder: Path) -> Iterable[Path]:
    run = RunFolder(folder)
    single = (run.recipe, run.metrics, run.routing_after, run.results)
    yield from (file for file in single if file.is_file())
    yield from sorted(run.evaluation.glob("tasks/*/samples.jsonl"))
    yield from (state.results for state in run.kept_steps().values() if state.results.is_file())


def state_of(output: Path, name: str) -> State:
    """A run's state, derived from its files."""
    folder = run_folder(output, name)
    if _note(folder).written:
        return "finished"
    if failed_file(output, name).is_file():
        return "failed"
    return "started" if RunFolder(folder).recipe.is_file() else "missing"
