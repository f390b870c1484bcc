"""A whole miniature: run the missing shards, then write and print the table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eval.effects.comparisons import BALANCE, Comparison, Effect
from eval.effects.settings import Miniature, load_miniature
from moe_finetune.errors import RecipeError
from moe_finetune.experiments.reproductions import require_matplotlib
from moe_finetune.io import output_lock


def run(
    recipe: str | Path,
    output: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    part: tuple[int, int] = (1, 1),
) -> int:
    """Run the miniature in the folder ``output`` and return the number of failed runs.

    ``output`` then contains ``shards/`` (one result a run), ``runs/`` (recipes and logs),
    ``effects.md|csv|json``, ``directions.md``, and ``pictures/``: P4's Figures 2 and 3, P0's
    Figure 1, and overlap against MaxVio of every arm.

    Args:
        recipe: a file such as ``recipes/studies/miniature.yaml``.
        output: new or empty folder; with ``resume`` the folder of this study.
        overrides: ``key.path=value``.
        resume: keep existing runs.
        part: ``(i, n)`` runs every n-th run from the i-th; the table covers all runs.

    Raises:
        RecipeError, OutputExistsError, OutputBusyError: the study cannot run, for the reason given.
        DependencyError: matplotlib is not installed.
    """
    from eval.effects.routing_pictures import draw_routing
    from eval.effects.shards import STUDY_FILE, begin, read_shards, run_shards
    from eval.effects.table import effect_rows, markdown, write_tables
    from eval.effects.theory.pictures import draw_pictures
    from eval.effects.upcycled import upcycle_rows

    require_matplotlib()
    study, output = load_miniature(recipe, overrides), Path(output)
    if not 1 <= part[0] <= part[1]:
        raise RecipeError(f"--shard {part[0]}/{part[1]}: write it as I/N, with I from 1 to N")
    with output_lock(output, shared=part != (1, 1)):
        with output_lock(output / STUDY_FILE, wait=True):
            begin(study, output, resume)
        failed = run_shards(study, output, part)
        with output_lock(output / "pictures", wait=True):
            results = read_shards(study, output)
            effects = effect_rows(results, upcycle_rows(study.upcycle), effects_of(study))
            write_tables(effects, results, output)
            draw_pictures(results, output / "pictures")
            draw_routing(results, output / "pictures")
    print(markdown(effects))
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    print(f"{len(results)} runs; tables: {output / 'effects.md'}, {output / 'directions.md'}")
    return len(failed)


def effects_of(study: Miniature) -> list[Effect]:
    """The effects that parts of this study measure; effect 11 comes from another study.

    If the study names a matching balance loss for an arm, the arm is compared with it.
    """
    from eval.effects.claims import EFFECTS
    from eval.effects.claims_at_shares import SHARES
    from eval.effects.shards import shards_of

    parts = {shard.part for shard in shards_of(study)}
    baselines = study.finetune.baselines if study.finetune else {}
    return [
        replace(effect, comparisons=[with_own_balance(c, baselines) for c in effect.comparisons])
        for effect in (SHARES if study.claims == "shares" else EFFECTS)
        if any(comparison.part in parts for comparison in effect.comparisons)
        or (not effect.comparisons and "finetune" in parts)
    ]


def with_own_balance(comparison: Comparison, baselines: Mapping[str, str]) -> Comparison:
    """``comparison`` with the arm's matching balance loss instead of ``aux_loss``."""
    if comparison.part != "finetune" or comparison.baseline != BALANCE:
        return comparison
    return replace(comparison, baseline=baselines.get(comparison.arm, BALANCE))


def plan(recipe: str | Path, overrides: Sequence[str] = ()) -> str:
    """The runs of a miniature, counted by part."""
    from eval.effects.shards import shards_of

    shards = shards_of(load_miniature(recipe, overrides))
    parts = dict.fromkeys(shard.part for shard in shards)
    lines = [f"{sum(s.part == part for s in shards):4d}  {part}" for part in parts]
    return "\n".join([*lines, f"{len(shards):4d}  runs in all"])
