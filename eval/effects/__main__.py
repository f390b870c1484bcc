"""Test a paper's claims: ``python -m eval.effects eval/effects/miniature.yaml --output FOLDER``.

Runs what is missing (in ``FOLDER/study`` an ordinary study, in ``FOLDER/programs`` what is no
recipe), then tests the claims on what is there. KEY=VALUE go to the study: ``seeds=[1,2]``,
``only.arm=[aux_loss,erc]``, ``trainer.max_steps=5``.
"""

import argparse
import importlib
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from eval.effects.claims import Claims, Made, Result, judge, load_claims, write
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io import output_lock, write_atomic
from moe_finetune.plugins import use
from moe_finetune.study import run_study
from moe_finetune.study.read_study import RunResult
from moe_finetune.study.recipe import load_study

Results = dict[str, dict[int, Result]]


class Tuned:
    """A run of a study; ``score`` is the mean of its benchmarks in percent, if it has any."""

    def __init__(self, run: RunResult):
        self.run, self.folder, self.curve = run, run.folder, run.curve

    def value(self, metric: str) -> float | None:
        """See :meth:`RunResult.value`."""
        if metric != "score":
            return self.run.value(metric)
        scores = [score.value for score in self.run.scores.values()]
        return 100 * sum(scores) / len(scores) if scores else None


def main() -> int:
    """Run, print the table; 1 if a run of the study failed."""
    parser = argparse.ArgumentParser(prog="python -m eval.effects", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="default: runs/ and the file's name")
    parser.add_argument("--study", help="another study with these arms")
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE")
    arguments = parser.parse_args()
    for plugin in arguments.plugin:
        use(plugin)
    claims = load_claims(arguments.file)
    output = arguments.output or Path("runs") / arguments.file.stem
    results: Results = {}
    seeds, failed = _seeds(claims, arguments.overrides), 0
    if file := arguments.study or claims.study:
        study = load_study(file, arguments.overrides)
        done = run_study(study, output / "study", resume=(output / "study").is_dir())
        seeds, failed = study.seeds, sum(run.state == "failed" for run in done.runs)
        for run in done.finished:
            results.setdefault(run.arm, {})[run.seed] = Tuned(run)
    with output_lock(output / "programs"):
        made = _run_programs(claims, seeds, output / "programs")
    print(write(judge(claims, results | made), output))
    _draw(claims, results, output / "pictures")
    return 1 if failed else 0


def _seeds(claims: Claims, overrides: list[str]) -> list[int]:
    for item in overrides:
        if item.startswith("seeds="):
            return yaml.safe_load(item.removeprefix("seeds="))
    return claims.seeds


def _run_programs(claims: Claims, seeds: list[int], output: Path) -> Results:
    """Run every arm and seed that has no result; an arm's name is ``PROGRAM/ARM``."""
    results: Results = {}
    for name, program in claims.programs.items():
        module = importlib.import_module(program.module)
        for seed in seeds:
            for arm, options in program.arms.items():
                file = output / name / arm / f"seed_{seed}.json"
                if not file.is_file():
                    made = module.run(program.settings, options, seed)
                    write_atomic(file, json.dumps(_plain(made)) + "\n")
                    print(f"{name}/{arm} seed {seed}", file=sys.stderr, flush=True)
                numbers = json.loads(file.read_text())
                results.setdefault(f"{name}/{arm}", {})[seed] = Made(numbers)
        if hasattr(module, "draw") and find_spec("matplotlib"):
            runs = {arm: [results[f"{name}/{arm}"][seed].numbers for seed in seeds]
                    for arm in program.arms}  # fmt: skip
            module.draw(runs, output.parent / "pictures")
    return results


def _plain(value: Any) -> Any:
    """``value`` with None for numbers that JSON cannot represent: infinity and NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw(claims: Claims, results: Results, folder: Path) -> None:
    if claims.pictures and find_spec("matplotlib"):
        from eval.effects.pictures import draw_figure1, draw_frontier

        balance, method = (results.get(claims.pictures[key], {}) for key in ("balance", "method"))
        if balance and method:
            draw_figure1(list(balance.values()), list(method.values()), folder / "p0_figure1.png")
        draw_frontier(results, folder / "frontier.png")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoeFinetuneError as error:
        sys.exit(f"error: {error}")
