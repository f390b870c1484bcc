"""``moe-finetune study``: run a study, or show its plan."""

from collections.abc import Sequence
from pathlib import Path

from moe_finetune.errors import StudyError
from moe_finetune.io.counted import counted


def carry_out_study(
    recipe: str, overrides: Sequence[str], output: Path, resume: bool, shard: str | None
) -> int:
    """Run the study, print its table and failures, and return the number of failed runs."""
    from moe_finetune.study import run_study
    from moe_finetune.study.recipe import find_study, load_study

    part = parse_shard(shard)
    file = find_study(recipe)
    results = run_study(load_study(file, overrides), output, resume, part)
    table = output / "tables" / "study.txt"
    if results.finished:
        print(table.read_text(encoding="utf-8"))
    print(f"{len(results.finished)} of {counted(len(results.runs), 'run')} finished")
    failed = [run for run in results.runs if run.state == "failed"]
    for run in failed:
        print(f"failed: {run.arm} seed {run.seed}: {run.reason}")
    if results.finished:
        print(f"tables: {table.parent}\nreport: {output / 'report' / 'index.html'}")
    return len(failed)


def show_plan(recipe: str, overrides: Sequence[str], output: Path | None) -> None:
    """Print the arms of a study with their runs; with ``output`` also how many are finished."""
    from moe_finetune.io.text_tables import aligned
    from moe_finetune.study import expand
    from moe_finetune.study.expand import different_routers
    from moe_finetune.study.folder import state_of
    from moe_finetune.study.recipe import find_study, load_study

    file = find_study(recipe)
    study = load_study(file, overrides)
    runs = expand(study)
    lines = [["arm", "runs", *(["finished"] if output else [])]]
    for arm in dict.fromkeys(run.arm for run in runs):
        names = [run.name for run in runs if run.arm == arm]
        done = [sum(state_of(output, name) == "finished" for name in names)] if output else []
        lines.append([arm, *map(str, (len(names), *done))])
    print(f"{study.title or study.name}: {counted(len(runs), 'run')}\n{aligned(lines, 'left')}")
    if difference := different_routers(runs):
        print(difference)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """``"2/4"`` -> ``(2, 4)``."""
    if text is None:
        return None
    index, slash, of = text.partition("/")
    if not (slash and index.isdigit() and of.isdigit()):
        raise StudyError(f"--shard {text}: expected I/N such as 2/4")
    return int(index), int(of)
