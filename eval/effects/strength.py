"""The strength study: each method over shares of its losses, on the demo's checkpoint.

A share is the norm of a loss's gradient over the language loss's, see
:mod:`moe_finetune.training.strength`. For every method: how far its target metric moves, and the
cost in held-out loss.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from eval.effects.settings import FinetuneSection, Miniature
from eval.effects.shards import Shard, begin, read_shards, run_shards
from moe_finetune.errors import RecipeError
from moe_finetune.experiments.reproductions import require_matplotlib
from moe_finetune.io import output_lock
from moe_finetune.recipe.section import Section
from moe_finetune.recipe.tree import load_tree, merge_mappings
from moe_finetune.recipe.validation import from_tree

BASELINE = "baseline"


class MethodSection(Section):
    """One method: its losses that get the share, and its target metric.

    ``method`` overrides keys of the study's ``baseline``; ``terms`` get the share in it.
    """

    terms: list[str] = Field(min_length=1)
    metric: str
    better: Literal["up", "down"]
    method: dict[str, Any] = Field(default_factory=dict)


class StrengthStudy(Section):
    """Everything that determines the study.

    Attributes:
        shares: the shares with which every method is trained.
        cost: largest rise of held-out loss, as a share of the baseline's, in the table.
        baseline: the ``method:`` that all others extend and are compared with.
        finetune: how the demo's checkpoint is fine-tuned; see :class:`FinetuneSection`.
    """

    kind: Literal["strength"]
    title: str
    seeds: list[int] = Field(min_length=1)
    shares: list[float] = Field(min_length=1)
    cost: float = Field(default=0.01, gt=0)
    baseline: dict[str, Any]
    methods: dict[str, MethodSection] = Field(min_length=1)
    finetune: dict[str, Any]

    def miniature(self) -> Miniature:
        """The same runs as fine-tunes of a miniature: one arm per method and share."""
        arms = {BASELINE: self.baseline}
        for share in self.shares:
            for name, section in self.methods.items():
                shares = {"terms": {term: {"share": share} for term in section.terms}}
                method = merge_mappings(merge_mappings(self.baseline, section.method), shares)
                arms[arm_of(name, share)] = method
        finetune = FinetuneSection.model_validate({**self.finetune, "arms": arms})
        return Miniature(kind="miniature", seeds=self.seeds, finetune=finetune)


def arm_of(method: str, share: float) -> str:
    """The name of the arm of a method and share."""
    return f"{method}-{share:g}"


def load_strength_study(path: str | Path, overrides: Sequence[str] = ()) -> StrengthStudy:
    """Read the study's recipe.

    Raises:
        RecipeError: an unknown key, method or option.
    """
    from eval.effects.settings import TABLE, with_table
    from moe_finetune.recipe.method import resolve_method

    study = from_tree(StrengthStudy, load_tree([path], overrides))
    finetune = study.miniature().finetune
    assert finetune is not None
    for arm, method in finetune.arms.items():
        try:
            resolve_method(with_table(method, TABLE))
        except RecipeError as error:
            raise RecipeError(f"{path}: {arm}: {error}") from None
    return study


def run(
    recipe: str | Path,
    output: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    part: tuple[int, int] = (1, 1),
) -> int:
    """Run the study in the folder ``output`` and return the number of failed runs.

    ``output`` then contains ``shards/`` (one result per run), ``runs/``, ``strength.md|json`` and
    ``strength.svg``, with a Pareto plot for each method.

    Raises:
        RecipeError, OutputExistsError, OutputBusyError: the study cannot run, for the reason given.
        DependencyError: matplotlib is not installed.
    """
    from eval.effects.shards import STUDY_FILE
    from eval.effects.strength_table import write_strength

    require_matplotlib()
    study, output = load_strength_study(recipe, overrides), Path(output)
    miniature = study.miniature()
    with output_lock(output, shared=part != (1, 1)):
        with output_lock(output / STUDY_FILE, wait=True):
            begin(miniature, output, resume)
        failed = run_shards(miniature, output, part)
        with output_lock(output / "strength.md", wait=True):
            print(write_strength(study, read_shards(miniature, output), output))
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return len(failed)


def shard_of(method: str, share: float, seed: int) -> Shard:
    """The run of a method, share and seed."""
    return Shard("finetune", arm_of(method, share), seed)


def plan(recipe: str | Path, overrides: Sequence[str] = ()) -> str:
    """The runs, counted."""
    study = load_strength_study(recipe, overrides)
    runs = len(study.seeds) * (1 + len(study.methods) * len(study.shares))
    return (
        f"{runs:4d}  runs: {len(study.methods)} methods at {len(study.shares)} shares and a "
        f"baseline, {len(study.seeds)} seeds"
    )
