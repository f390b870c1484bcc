"""What ``moe-finetune study`` does: carry a study out, or show its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_finetune.errors import StudyError


def carry_out_study(
    recipe: str, overrides: Sequence[str], output: Path, resume: bool, shard: str | None
) -> int:
    """Run the study, print what became of it, and return how many of its runs have failed."""
    from moe_finetune.studies import load_study, run_study

    results = run_study(load_study(recipe, overrides), output, resume, parse_shard(shard))
    print(f"{len(results.finished)} of {len(results.runs)} runs finished")
    failed = [run for run in results.runs if run.state == "failed"]
    for run in failed:
        print(f"failed: {run.arm} seed {run.seed}: {run.reason}")
    if results.finished:
        print(f"tables: {output / 'tables'}\nreport: {output / 'report' / 'index.html'}")
    return len(failed)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """``"2/4"`` -> ``(2, 4)``."""
    if text is None:
        return None
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit()):
        raise StudyError(f"--shard {text}: wanted I/N such as 2/4")
    return int(number), int(of)
