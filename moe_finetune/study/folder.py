"""A study's folder: its runs, their states, and the evidence that its table reads.

``study.json`` (the runs with the hashes of their recipes) · ``recipes/ARM/seed_N.yaml`` ·
``runs/ARM/seed_N/`` (ordinary run folders) · ``logs/ARM/seed_N.log`` and ``.failed`` ·
``tables/`` · ``report/index.html``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from moe_finetune.errors import OutputExistsError, StudyError
from moe_finetune.io import write_atomic
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.study.expand import REFERENCES, Run, reference_of
from moe_finetune.study.recipe import StudyRecipe

MANIFEST = "study.json"
SCHEMA = 2
State = Literal["finished", "started", "failed", "missing"]


def run_folder(output: Path, name: str) -> RunFolder:
    """The folder of the run ``ARM/seed_N``."""
    return RunFolder(output / "runs" / name)


def recipe_file(output: Path, name: str) -> Path:
    """File with the resolved recipe that the run is started with."""
    return output / "recipes" / f"{name}.yaml"


def log_file(output: Path, name: str) -> Path:
    """The output of the run's process; a process that works on the run locks it."""
    return output / "logs" / f"{name}.log"


def failed_file(output: Path, name: str) -> Path:
    """The file that says why the run failed; it lies next to the log, outside the run's folder."""
    return output / "logs" / f"{name}.failed"


def state_of(output: Path, name: str) -> State:
    """A run's state, derived from its files."""
    run = run_folder(output, name)
    if run.finished:
        return "finished"
    if failed_file(output, name).is_file():
        return "failed"
    return "started" if run.recipe.is_file() else "missing"


def check_evidence(run: RunFolder) -> None:
    """Raise StudyError if files of a finished run have changed since it finished."""
    now = run.evidence()
    for name, digest in run.read_summary().get("evidence", {}).items():
        if now.get(name) != digest:
            what = "was changed" if name in now else "is missing"
            raise StudyError(
                f"{run.path / name}: {what} after the run finished; delete {run.path} to redo it"
            )


def prepare(study: StudyRecipe, runs: Sequence[Run], output: Path, resume: bool) -> None:
    """Check the folder and write ``study.json`` and the runs' recipes into it."""
    from moe_finetune.recipe.schema import load_recipe

    exists = enter_folder(output, output / MANIFEST, "a study", resume)
    for run in runs:
        saved = run_folder(output, run.name).recipe
        if saved.is_file() and load_recipe(saved).hash != run.recipe.hash:
            raise StudyError(
                f"{saved.parent}: was made with a different recipe ({saved}) than the study has "
                "now; choose another --output, or delete this run to redo it"
            )
    if exists:
        _check_same(runs, output)
    names = {axis: list(dict.fromkeys(run.values[axis] for run in runs)) for axis in study.axes}
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        **study.model_dump(
            include={"name", "source", "seeds", "together", "benchmarks", "metrics"}
        ),
        "title": study.title or study.name,
        "axes": names,
        **{key: reference_of(study, key, names) for key in REFERENCES},
        "runs": [
            {"arm": r.arm, "seed": r.seed, "values": r.values, "recipe_sha256": r.recipe.hash}
            for r in runs
        ],
    }
    # Written first, because it marks the folder as a study that other processes may join.
    write_atomic(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    for run in runs:
        write_atomic(recipe_file(output, run.name), run.recipe.to_yaml())


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
