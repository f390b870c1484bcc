"""The runs of a miniature, one result file each; only missing results are run."""

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eval.effects.settings import Miniature
from moe_finetune.errors import RecipeError
from moe_finetune.io import write_atomic
from moe_finetune.io.folder import enter_folder
from moe_finetune.io.json_file import read_json, read_object
from moe_finetune.io.ledger import Attempt, Ledger, Step

log = logging.getLogger(__name__)
Part = Literal["recovery", "classification", "finetune", "scratch"]
STUDY_FILE = "study.json"


@dataclass(frozen=True)
class Shard:
    """One run: a part of the study, an arm and a seed."""

    part: Part
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Path below ``shards/``, without suffix."""
        return f"{self.part}/{self.arm}/seed_{self.seed}"

    def file(self, output: Path) -> Path:
        """The file of its result."""
        return output / "shards" / f"{self.name}.json"


def shards_of(study: Miniature) -> list[Shard]:
    """All runs, seed by seed, so that an interrupted study has complete seeds."""
    shards = []
    for index, seed in enumerate(study.seeds):
        if study.recovery is not None:
            shards.append(Shard("recovery", "sweep", seed))
        if study.classification is not None:
            shards += [Shard("classification", arm, seed) for arm in study.classification.arms]
        if study.finetune is not None:
            count = study.finetune.first_seeds
            arms = [arm for arm in study.finetune.arms if index < count.get(arm, len(study.seeds))]
            shards += [Shard("finetune", arm, seed) for arm in arms]
        if study.scratch is not None:
            shards += [Shard("scratch", arm, seed) for arm in study.scratch.arms]
    return shards


def begin(study: Miniature, output: Path, resume: bool = False) -> None:
    """Create the study's folder, or with ``resume`` check that it belongs to this study.

    The study in it may have other seeds or arms, but its runs must have the same settings.

    Raises:
        OutputExistsError: the folder has other files, or this study and ``resume`` is not set.
        RecipeError: the runs in the folder have other settings.
    """
    settings = study.model_dump(mode="json")
    study_file = output / STUDY_FILE
    if enter_folder(output, study_file, "a study", resume):
        saved = read_object(study_file, RecipeError, f"choose another --output than {output}")
        different = [key for key in _decisive(settings) if _clash(saved, settings, key)]
        if different:
            raise RecipeError(
                f"{output}: has runs of this study with other settings under "
                f"{', '.join(different)}; choose another --output"
            )
    write_atomic(study_file, json.dumps(settings, indent=2) + "\n")


def _decisive(settings: dict[str, Any]) -> Iterator[str]:
    for part in ("recovery", "classification", "finetune", "scratch"):
        if settings.get(part) is not None:
            yield part


def _clash(saved: dict[str, Any], settings: dict[str, Any], part: str) -> bool:
    old_part, now = saved.get(part), settings[part]
    if old_part is None:
        return False
    without = ("arms", "first_seeds", "once")  # the last one in studies of earlier versions
    if {k: v for k, v in old_part.items() if k not in without} != {
        k: v for k, v in now.items() if k not in without
    }:
        return True
    arms, old = now.get("arms", {}), old_part.get("arms", {})
    return isinstance(arms, dict) and any(arms[a] != old[a] for a in set(arms) & set(old))


class Runner:
    """Runs shards of one study; shared inputs are made once."""

    def __init__(self, study: Miniature, output: Path):
        self.study, self.output = study, output
        self._bench: Any = None

    def run(self, shard: Shard) -> dict[str, Any]:
        """Run the shard and return its result, without writing it."""
        if shard.part == "recovery":
            from eval.effects.theory.recovery import coherence_sweep

            assert self.study.recovery is not None
            return coherence_sweep(shard.seed, **self.study.recovery.model_dump())
        if shard.part == "classification":
            from eval.effects.theory.classification import Setting, run_arm

            assert self.study.classification is not None
            setting = Setting(**self.study.classification.setting)  # type: ignore[arg-type]
            return run_arm(shard.arm, shard.seed, setting)  # type: ignore[arg-type]
        if shard.part == "scratch":
            from eval.effects.scratch import run_scratch

            assert self.study.scratch is not None
            return run_scratch(self.study.scratch, self.study.scratch.arms[shard.arm], shard.seed)
        from eval.effects.finetune import Workbench, run_finetune

        assert self.study.finetune is not None
        if self._bench is None:
            self._bench = Workbench(self.study.finetune, self.output)
        method = self.study.finetune.arms[shard.arm]
        return run_finetune(self._bench, method, shard.seed, self.output / "runs" / shard.name)


def run_shards(study: Miniature, output: Path, part: tuple[int, int] = (1, 1)) -> dict[str, str]:
    """Run the shards without a result; return the reasons of failures by shard name.

    The next call retries failed shards. ``part`` ``(i, n)`` selects every n-th shard from the i-th
    (counted from 1), so that n processes share a study.
    """
    runner = Runner(study, output)
    shards = shards_of(study)[part[0] - 1 :: part[1]]
    ledger = Ledger(output, [_step(shard, runner) for shard in shards])
    log.info(
        "%d runs, %d of them to do", len(shards), sum(not ledger.done(n) for n in ledger.steps)
    )
    tried = {name: ledger.attempt(name) for name in ledger.steps}
    return {name: why for name, why in tried.items() if why is not None}


def _step(shard: Shard, runner: Runner) -> Step:
    file = shard.file(runner.output)

    def make(attempt: Attempt) -> None:
        start = time.perf_counter()
        result = runner.run(shard)
        saved = {"seconds": round(time.perf_counter() - start, 2), **_plain(result)}
        write_atomic(file, json.dumps(saved) + "\n")

    return Step(shard.name, make, done=file.is_file)


def read_shards(study: Miniature, output: Path) -> dict[Shard, dict[str, Any]]:
    """The existing results of the study's shards.

    Raises:
        RecipeError: a result cannot be read; delete it to run the shard again.
    """
    results = {}
    for shard in shards_of(study):
        file = shard.file(output)
        if not file.exists():
            continue
        results[shard] = read_json(file, RecipeError, "delete it to run it again")
    return results


def _plain(value: Any) -> Any:
    """``value`` with None for numbers that JSON cannot represent: infinity and NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
